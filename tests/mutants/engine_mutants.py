"""Bugs planted in batching, priorities, retention and fairness; those of the cache and of plans are in tests/simulation."""

from __future__ import annotations

from backend.api.request import Request
from backend.core import sequence
from backend.core.sequence import TRANSITIONS, Event, Status
from backend.engine import intake
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.engine.publish import Interval, ResponseBuffer
from backend.kvcache.evicted import EvictedPrefixes
from backend.kvcache.prefix_trie import PrefixTrie
from backend.scheduler import step_rows
from backend.scheduler.capacity import StaticBatch
from backend.scheduler.micro_batch import MicroBatchScheduler
from backend.scheduler.queue import WaitingQueue
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.shares import Shares
from backend.scheduler.tuning import BatchTuner
from tests.mutants.changes import Plant, change, change_everywhere

STATIC = ["tests/engine/test_static_batching.py"]
PRIORITY = ["tests/scheduler/test_priority.py"]
TUNING = ["tests/scheduler/test_tuning.py"]
INTERVAL = ["tests/engine/test_stream_interval.py"]
TAILS = ["tests/kvcache/test_tails.py"]

QSERVE = ["tests/engine/test_contract_of_qserve.py"]
LIFE = ["tests/core/test_sequence.py"]
EVICTED = ["tests/kvcache/test_evicted.py"]


def _may_pause(status: Status) -> Plant:
    """An edge from this status to PAUSED."""
    edges = {**TRANSITIONS, (status, Event.PAUSE): Status.PAUSED}
    return lambda set_attribute: set_attribute(sequence, "TRANSITIONS", edges)


FAIRNESS = ["tests/scheduler/test_fairness.py"]

MUTANTS = {
    "an_idle_session_may_be_paused": (_may_pause(Status.IDLE), LIFE),
    "a_waiting_sequence_may_be_paused": (_may_pause(Status.WAITING), LIFE),
    "inputs_besides_tokens_stay_behind": (
        change_everywhere(step_rows.new_row, ("extra_inputs=request.extra_inputs", "extra_inputs={}")),
        QSERVE,
    ),
    "keys_of_blocks_forget_inputs": (
        change(Request, "kv_origin", ("sorted(self.extra_inputs.items())", "len(self.extra_inputs)")),
        QSERVE,
    ),
    "what_is_cached_again_counts_as_evicted": (change(EvictedPrefixes, "discard", ("self._hashes.pop", "id")), EVICTED),
    "a_request_waits_from_the_step_that_takes_it": (
        change(EngineLoop, "_apply", ("request, posted_ns", "request")),
        ["tests/engine/test_loop.py"],
    ),
    "a_defect_leaves_its_request": (
        change(EngineCore, "_contained", ("except Exception", "except EverbatchError")),
        ["tests/engine/test_core_failures.py"],
    ),
    "a_failed_answer_ends_the_loop": (
        change(EngineCore, "_publish", ("except Exception", "except EverbatchError")),
        ["tests/engine/test_core_failures.py"],
    ),
    "an_interval_is_counted_from_the_former": (
        change(Interval, "is_over", ("= now_ns + self", "+= self")),
        INTERVAL,
    ),
    "many_prompts_hold_streams_up": (
        change(MicroBatchScheduler, "context_budget", ("self.max_mixed_context_tokens, ", "")),
        ["tests/scheduler/test_context_limits.py"],
    ),
    "a_pause_holds_tokens_back": (change(EngineCore, "_schedule", ("plan.paused)", "())")), INTERVAL),
    "a_static_batch_takes_others_in": (change(StaticBatch, "admit", ("if running else", "if False else")), STATIC),
    "held_ids_are_free": (change(ResponseBuffer, "holds", ("any(", "False and any(")), STATIC),
    "empty_rows_are_not_counted": (change(Scheduler, "commit", ("self._num_batch - ", "0 * ")), STATIC),
    "priority_is_ignored": (
        change(WaitingQueue, "append", ("insort(self._priorities, -priority)", "self._priorities.append(-priority)")),
        PRIORITY,
    ),
    "the_paused_are_overtaken": (
        change(WaitingQueue, "put_back", ("appendleft", "append")),
        ["tests/scheduler/test_queue.py"],
    ),
    "a_last_block_is_entered_though_another_begins_like_it": (
        change(PrefixTrie, "insert_tail", ("_longest_head(node, tail)[1] == len(tail)", "tail in node.children")),
        TAILS,
    ),
    "more_run_than_tuned": (
        change(Scheduler, "_finds_no_place", ("len(beams) > most", "len(beams) > most + 1")),
        TUNING,
    ),
    "averages_are_rounded_down": (
        change(
            BatchTuner,
            "average_tokens",
            ("-(-(self._num_prompt + self._num_output)", "((self._num_prompt + self._num_output)"),
        ),
        TUNING,
    ),
    "whoever_fills_the_queue_keeps_others_out": (
        change_everywhere(intake._is_full, ("own > limit // SPARE", "True")),
        FAIRNESS,
    ),
    "there_is_no_end_to_the_queue": (
        change_everywhere(intake._is_full, ("or total > limit + limit // SPARE", "")),
        FAIRNESS,
    ),
    "all_slots_go_to_a_flood": (
        change(Scheduler, "_leaves_others_ahead", ("return keeps_slots and self", "return False and self")),
        FAIRNESS,
    ),
    "a_flood_counts_what_it_has_and_not_what_it_gets": (
        change(Scheduler, "_leaves_others_ahead", ("_num_of(plan.admitted, namespace)", "0")),
        FAIRNESS,
    ),
    "a_namespace_counts_for_ever": (change(Shares, "admit", ("> RECENT", "> 1 << 30")), FAIRNESS),
}
