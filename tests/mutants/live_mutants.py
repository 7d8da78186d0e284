"""Planted bugs: the live view of the engine is wrong, costs too much or tells what clients wrote."""

from __future__ import annotations

from backend.engine import live
from backend.engine.live import LiveViews
from backend.engine.statistics import Statistics
from backend.kvcache import block_map
from client import top
from client.top import BlockMap, Rates
from tests.mutants.changes import change, change_everywhere

LIVE = ["tests/engine/test_live.py"]
TOP = ["tests/client/test_top.py"]

MUTANTS = {
    "names_of_clients_are_shown": (
        change(
            LiveViews,
            "_hash",
            ('hashlib.blake2b(name.encode(errors="replace"), digest_size=4, key=self._key).hexdigest()', "name"),
        ),
        LIVE,
    ),
    "names_are_hashed_without_a_key": (change(LiveViews, "_hash", (", key=self._key", "")), LIVE),
    "the_whole_queue_is_shown": (change(LiveViews, "view", ("MAX_QUEUED", "None")), LIVE),
    "each_look_makes_a_view": (change(LiveViews, "answer", ("now_ns - self._made_ns >= REUSE_NS", "True")), LIVE),
    "a_view_is_never_made_anew": (change(LiveViews, "answer", ("or now_ns - self._made_ns >= REUSE_NS", "")), LIVE),
    "idle_sessions_own_no_blocks": (change(LiveViews, "view", ("[*running, *idle]", "[*running]")), LIVE),
    "evicted_kv_of_a_session_counts_as_cached": (
        change(
            LiveViews,
            "_session",
            ("survivors(seq, seq.num_tokens)[1]", "survivors(seq, seq.num_tokens)[1] * 0 + seq.num_tokens"),
        ),
        LIVE,
    ),
    "a_block_that_was_evicted_keeps_its_owner": (
        change_everywhere(block_map.block_map, (" and blocks.is_current(handle)", "")),
        LIVE,
    ),
    "the_map_grows_with_the_pool": (
        change_everywhere(block_map.block_map, ("-(-blocks.num_blocks // MAX_CELLS)", "1")),
        LIVE,
    ),
    "runs_of_the_map_are_not_joined": (change_everywhere(block_map._runs, ("runs[-1] += 1", "runs[-1] += 2")), LIVE),
    "the_first_token_counts_from_the_start_of_the_engine": (
        change(Statistics, "count_end", ("seq.first_token_ns - seq.arrival_ns", "seq.first_token_ns")),
        LIVE,
    ),
    "a_paused_row_is_said_to_run": (change_everywhere(live._stage, ("seq.is_generating", "True")), LIVE),
    "rates_go_over_a_restart": (change(Rates, "take", ('or before["engine"] != view["engine"]', "")), TOP),
    "the_map_leaves_the_screen": (
        change(BlockMap, "__rich_console__", ("states = self._states[::step]", "states = self._states")),
        TOP,
    ),
    "an_engine_that_is_away_ends_the_watch": (
        change_everywhere(top.watch, ("except ClientError", "except ZeroDivisionError")),
        TOP,
    ),
}
