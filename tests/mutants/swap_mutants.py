"""Planted bugs of preemption by swapping."""

from __future__ import annotations

from backend.engine.intake import Intake
from backend.engine.steps_in_flight import StepInFlight
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.plan import KVPlan
from backend.kvcache.swap import SwapSpace
from backend.worker.kv_storage import KVStorage
from backend.worker.pipeline import Runner
from tests.mutants.changes import Plant, change

ENGINE = ["tests/engine/test_swapping.py"]
MODEL = ["tests/model/test_swapping.py"]

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "blocks_that_others_run_with_are_swapped": (
        change(SwapSpace, "_indices", ("self._blocks.ref_count(handle.block_id) == leaving[handle]", "True")),
        ENGINE,
    ),
    "more_come_back_than_there_are_slots": (
        change(KVPlan, "admit", ("self.free_slots == 0", "False")),
        ENGINE,
    ),
    "there_is_always_room": (
        change(SwapSpace, "can_swap_out", ("num_blocks <= len(self._free)", "True")),
        ENGINE,
    ),
    "places_are_never_free_again": (
        change(SwapSpace, "forget", ("self._free.append(place)", "pass")),
        ENGINE,
    ),
    "places_outlive_a_failed_step": (
        change(SwapSpace, "lose_everything", ("self._held.clear()", "return")),
        ENGINE,
    ),
    "the_rows_of_a_search_share_nothing_any_more": (
        change(SwapSpace, "allocate", ("place in restored and index < num_full", "False")),
        ENGINE,
    ),
    "what_is_swapped_is_computed_again": (
        change(KVPlan, "_find", ("state.swap.holds(seq) and computed < own", "False")),
        ENGINE,
    ),
    "a_cancelled_request_keeps_its_places": (
        change(KVCacheManager, "release", ("self.state.swap.forget(seq)", "pass")),
        ENGINE,
    ),
    "nobody_hears_that_there_is_no_room": (
        change(Intake, "refusals", ("in plan.no_room", "in ()")),
        ENGINE,
    ),
    "a_step_that_only_swaps_is_not_run": (
        change(StepInFlight, "has_work", (" or self.step.swap_out", "")),
        ["tests/engine/test_swapping.py"],
    ),
    "kv_comes_back_in_the_layers_of_others": (
        change(KVStorage, "swap_in", ("zip(self.pools, self._host[number]", "zip(self.pools[::-1], self._host[number]")),
        MODEL,
    ),
    "kv_comes_back_after_the_step": (
        change(Runner, "prepare", ("self.storage.swap_in(step.swap_in)", "pass")),
        MODEL,
    ),
}  # fmt: skip
