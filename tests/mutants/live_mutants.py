"""Planted bugs: the live view of the engine is wrong, costs too much or tells what clients wrote."""

from __future__ import annotations

from backend.engine.live import LiveViews
from backend.kvcache import block_map
from client import top
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
    "the_whole_queue_is_shown": (change(LiveViews, "view", ("MAX_QUEUED", "None")), LIVE),
    "evicted_kv_of_a_session_counts_as_cached": (
        change(
            LiveViews,
            "_session",
            ("survivors(seq, seq.num_tokens)[1]", "survivors(seq, seq.num_tokens)[1] * 0 + seq.num_tokens"),
        ),
        LIVE,
    ),
    "the_map_grows_with_the_pool": (
        change_everywhere(block_map.block_map, ("-(-blocks.num_blocks // MAX_CELLS)", "1")),
        LIVE,
    ),
    "an_engine_that_is_away_ends_the_watch": (
        change_everywhere(top.watch, ("except ClientError", "except ZeroDivisionError")),
        TOP,
    ),
}
