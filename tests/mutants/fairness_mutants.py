"""Planted bugs: a client that floods the server delays the others, or keeps them out."""

from __future__ import annotations

from backend.engine import intake
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.shares import Shares
from tests.mutants.changes import change, change_everywhere

FAIRNESS = ["tests/scheduler/test_fairness.py"]

MUTANTS = {
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
