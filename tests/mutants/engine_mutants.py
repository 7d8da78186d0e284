"""Bugs planted in batching, priorities and retention; those of the cache and the scheduler's plans are in tests/simulation."""

from __future__ import annotations

from backend.engine import update
from backend.engine.core import EngineCore
from backend.engine.outbox import Outbox
from backend.engine.publish import Interval
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.eviction import EvictionOrder, Retained
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.prefix_trie import PrefixTrie
from backend.kvcache.state import CacheState
from backend.scheduler.capacity import StaticBatch
from backend.scheduler.micro_batch import MicroBatchScheduler
from backend.scheduler.queue import WaitingQueue
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.tuning import BatchTuner
from tests.mutants.changes import change

STATIC = ["tests/engine/test_static_batching.py"]
PRIORITY = ["tests/scheduler/test_priority.py"]
RETENTION = ["tests/kvcache/test_retention.py"]
TUNING = ["tests/scheduler/test_tuning.py"]
INTERVAL = ["tests/engine/test_stream_interval.py"]
TAILS = ["tests/kvcache/test_tails.py"]

MUTANTS = {
    "an_interval_never_begins": (change(Interval, "is_over", ("now_ns + self._interval_ns", "now_ns")), INTERVAL),
    "an_interval_is_counted_from_the_former": (
        change(Interval, "is_over", ("= now_ns + self", "+= self")),
        INTERVAL,
    ),
    "the_first_token_waits": (change(EngineCore, "_publish", (" or publish.is_told_at_once(seq)", "")), INTERVAL),
    "many_prompts_hold_streams_up": (
        change(MicroBatchScheduler, "context_budget", ("self.max_mixed_context_tokens, ", "")),
        ["tests/scheduler/test_context_limits.py"],
    ),
    "a_pause_holds_tokens_back": (change(EngineCore, "_schedule", ("plan.paused)", "())")), INTERVAL),
    "a_static_batch_takes_others_in": (change(StaticBatch, "admit", ("if running else", "if False else")), STATIC),
    "a_short_answer_does_not_wait": (
        change(Outbox, "put", ("self._held if held else self._ready", "self._ready")),
        STATIC,
    ),
    "held_ids_are_free": (change(Outbox, "holds", ("any(", "False and any(")), STATIC),
    "a_static_batch_is_cut_to_a_step": (change(Scheduler, "_admit", ("(room or self.is_static)", "room")), STATIC),
    "empty_rows_are_not_counted": (change(Scheduler, "commit", ("self._num_batch - ", "0 * ")), STATIC),
    "a_timeout_waits_for_the_batch": (
        change(update, "ends_with_its_batch", ("ended_by_itself and", "")),
        STATIC,
    ),
    "priority_is_ignored": (change(WaitingQueue, "append", ("priority < priority", "priority < -1")), PRIORITY),
    "equals_overtake": (change(WaitingQueue, "append", ("priority < priority", "priority <= priority")), PRIORITY),
    "the_paused_are_overtaken": (change(WaitingQueue, "append", ("place > self.num_paused", "place > 0")), PRIORITY),
    "high_goes_first": (change(EvictionOrder, "first", ("min(p for", "max(p for")), RETENTION),
    "nothing_lapses": (change(BlockManager, "lapse", ("block.lapse != lapse", "True")), RETENTION),
    "void_lapses_count": (change(BlockManager, "lapse", ("block.lapse != lapse", "False")), RETENTION),
    "a_head_is_kept_for_itself": (change(Retained, "before", ("own.priority < self.priority", "False")), RETENTION),
    "events_tell_no_priority": (change(PrefixTrie, "tell_updated", ("node is not None and", "False and")), RETENTION),
    "nothing_is_retained": (change(KVCacheManager, "_retain", ("if retention is None and", "if")), RETENTION),
    "no_last_block_is_found": (
        change(KVCacheManager, "release", ("if not keep and (tail", "if keep and (tail")),
        TAILS,
    ),
    "a_last_block_that_is_written_to_is_entered": (
        change(CacheState, "tail", ("self.blocks.ref_count(handle.block_id) == 1", "True")),
        TAILS,
    ),
    "a_last_block_is_entered_for_strangers": (change(CacheState, "tail", ("and self._finds_heads(seq)", "")), TAILS),
    "the_last_block_of_a_hypothesis_is_entered": (
        change(CacheState, "tail", ("and seq.beam_width == 1", "")),
        TAILS,
    ),
    "a_last_block_is_entered_though_another_begins_like_it": (
        change(PrefixTrie, "insert_tail", ("_longest_head(node, tail)[1] == len(tail)", "tail in node.children")),
        TAILS,
    ),
    "events_tell_no_last_block": (
        change(PrefixTrie, "insert_tail", ("self._tell_stored([leaf], lora_id)", "pass")),
        TAILS,
    ),
    "more_run_than_tuned": (change(Scheduler, "_admit", ("len(beams) > most", "len(beams) > most + 1")), TUNING),
    "the_average_is_of_all": (change(BatchTuner, "note_end", ("self._num_prompt -= prompt", "pass")), TUNING),
    "averages_are_rounded_down": (
        change(
            BatchTuner,
            "average_tokens",
            ("-(-(self._num_prompt + self._num_output)", "((self._num_prompt + self._num_output)"),
        ),
        TUNING,
    ),
    "tuned_steps_starve_rows": (
        change(BatchTuner, "max_num_tokens", ("max(self._config.max_batch_size, most // share)", "most // share")),
        TUNING,
    ),
}
