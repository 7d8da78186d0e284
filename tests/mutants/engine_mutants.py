"""Bugs planted in batching, priorities and retention; those of the cache and the scheduler's plans are in tests/simulation."""

from __future__ import annotations

from backend.api.request import Request
from backend.core.group import SequenceGroup
from backend.engine import beams, intake, update
from backend.engine import core as engine_core
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.engine.outbox import Outbox
from backend.engine.publish import Interval
from backend.executor.transport import InProcessTransport
from backend.kvcache.block_manager import BlockManager
from backend.kvcache.evicted import EvictedPrefixes
from backend.kvcache.eviction import EvictionOrder, Retained
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.prefix_trie import PrefixTrie
from backend.kvcache.state import CacheState
from backend.scheduler import capacity, step_rows
from backend.scheduler.capacity import StaticBatch
from backend.scheduler.micro_batch import MicroBatchScheduler
from backend.scheduler.queue import WaitingQueue
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.tuning import BatchTuner
from tests.mutants.changes import change, change_everywhere

STATIC = ["tests/engine/test_static_batching.py"]
PRIORITY = ["tests/scheduler/test_priority.py"]
RETENTION = ["tests/kvcache/test_retention.py"]
TUNING = ["tests/scheduler/test_tuning.py"]
INTERVAL = ["tests/engine/test_stream_interval.py"]
TAILS = ["tests/kvcache/test_tails.py"]

QSERVE = ["tests/engine/test_contract_of_qserve.py"]
BEAMS = ["tests/engine/test_beams.py"]
EVICTED = ["tests/kvcache/test_evicted.py"]

MUTANTS = {
    "a_row_of_a_search_is_paused_alone": (
        change_everywhere(capacity._pop_youngest, ("victims[0].beam_width > 1 and", "False and")),
        QSERVE,
    ),
    "inputs_besides_tokens_stay_behind": (
        change_everywhere(step_rows.new_row, ("extra_inputs=request.extra_inputs", "extra_inputs={}")),
        QSERVE,
    ),
    "keys_of_blocks_forget_inputs": (
        change(Request, "namespace", ("sorted(self.extra_inputs.items())", "len(self.extra_inputs)")),
        QSERVE,
    ),
    "bad_words_leave_too_few_candidates": (
        change(intake, "make_beams", (" + len(request.bad_words)", "")),
        BEAMS,
    ),
    "unset_early_stopping_is_never": (change(beams, "_is_over", ("in (None, 1)", "in (1,)")), BEAMS),
    "what_is_cached_again_counts_as_evicted": (change(EvictedPrefixes, "discard", ("self._hashes.pop", "id")), EVICTED),
    "evicted_prefixes_grow_without_end": (
        change(EvictedPrefixes, "add", ("while len", "while False and len")),
        EVICTED,
    ),
    "strangers_are_told_of_evictions": (
        change(CacheState, "num_lost_tokens", ("lost if self.may_report_hits(seq) else 0", "lost")),
        EVICTED,
    ),
    "a_request_waits_from_the_step_that_takes_it": (
        change(EngineLoop, "_apply", ("request, posted_ns", "request")),
        ["tests/engine/test_loop.py"],
    ),
    "deadlines_are_computed_unchecked": (
        change(EngineCore, "enqueue", ("self.intake.check(request)", "request")),
        ["tests/engine/test_core_failures.py"],
    ),
    "a_defect_leaves_its_request": (
        change(EngineCore, "_contained", ("except Exception", "except EverbatchError")),
        ["tests/engine/test_core_failures.py"],
    ),
    "a_failed_answer_ends_the_loop": (
        change(EngineCore, "_publish", ("except Exception", "except EverbatchError")),
        ["tests/engine/test_core_failures.py"],
    ),
    "a_pool_may_be_larger_than_memory": (
        change(engine_core, "num_pool_blocks", ("num_bytes > free_memory_bytes", "False")),
        ["tests/engine/test_core_pool.py"],
    ),
    "a_field_in_the_place_of_a_struct_stays_a_dict": (
        change(InProcessTransport, "send", ("with_checked_types(command.request)", "command.request")),
        ["tests/executor/test_executor.py"],
    ),
    "an_interval_never_begins": (change(Interval, "is_over", ("now_ns + self._interval_ns", "now_ns")), INTERVAL),
    "an_interval_is_counted_from_the_former": (
        change(Interval, "is_over", ("= now_ns + self", "+= self")),
        INTERVAL,
    ),
    "the_first_token_waits": (change(EngineCore, "_publish", (" or publish.is_published_at_once(seq)", "")), INTERVAL),
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
    "priority_is_ignored": (
        change(WaitingQueue, "append", ("insort(self._priorities, -priority)", "self._priorities.append(-priority)")),
        PRIORITY,
    ),
    "the_paused_are_overtaken": (
        change(WaitingQueue, "put_back", ("appendleft", "append")),
        ["tests/scheduler/test_queue.py"],
    ),
    "requests_take_no_turns": (
        change(WaitingQueue, "take", ("namespaces[namespace].move_to_end(seq.request_id)", "pass")),
        ["tests/scheduler/test_queue.py"],
    ),
    "namespaces_take_no_turns": (
        change(WaitingQueue, "take", ("namespaces.move_to_end(namespace)", "pass")),
        ["tests/scheduler/test_queue.py"],
    ),
    "an_empty_namespace_stays_in_the_queue": (
        change(WaitingQueue, "_remove_from_line", ("if not requests:", "if False:")),
        ["tests/scheduler/test_queue.py"],
    ),
    "many_sequences_take_every_slot": (
        change(Scheduler, "_leaves_others_ahead", ("plan.kv.free_slots <= self._kept_slots", "False")),
        ["tests/engine/test_several_sequences.py"],
    ),
    "waiting_for_a_prompt_holds_up_others": (
        change(SequenceGroup, "holds_back", ("not self.has_prompt and", "not self.has_prompt or")),
        ["tests/engine/test_several_sequences.py"],
    ),
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
