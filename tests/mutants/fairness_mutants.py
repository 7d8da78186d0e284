"""Planted bugs: a client that floods the server delays the others, or keeps them out."""

from __future__ import annotations

from backend.engine import intake
from backend.scheduler.queue import WaitingQueue
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.shares import Shares
from tests.mutants.changes import change, change_everywhere

FAIRNESS = ["tests/scheduler/test_fairness.py"]

MUTANTS = {
    "a_weight_is_not_counted": (
        change(WaitingQueue, "take", ("line.num_turns >= line.weight", "True")),
        FAIRNESS,
    ),
    "turns_are_never_over": (change(WaitingQueue, "take", ("line.num_turns = 0", "pass")), FAIRNESS),
    "a_lower_priority_waits_for_ever": (
        change(WaitingQueue, "take", ("self._served_at[priority] = self._num_admissions", "pass")),
        FAIRNESS,
    ),
    "a_plan_does_not_count_overtaking": (
        change(WaitingQueue, "__iter__", ("num_admissions += 1", "pass")),
        FAIRNESS,
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
    "prompts_of_a_flood_come_first": (
        change(Scheduler, "_in_turn", ("if not self._shares.is_contended", "if True")),
        FAIRNESS,
    ),
    "a_flood_counts_what_it_has_and_not_what_it_gets": (
        change(Scheduler, "_leaves_others_ahead", ("_num_of(plan.admitted, namespace)", "0")),
        FAIRNESS,
    ),
    "prompts_of_a_flood_leave_no_tokens": (
        change(Scheduler, "_ahead_of", (" if not self._crowds(other)", "")),
        FAIRNESS,
    ),
    "a_namespace_counts_for_ever": (change(Shares, "admit", ("> RECENT", "> 1 << 30")), FAIRNESS),
    "slots_are_not_given_back": (change(Shares, "leave", ("-= 1", "-= 0")), FAIRNESS),
}
