"""Planted bugs of preemption by swapping."""

from __future__ import annotations

from backend.kvcache.swap import SwapSpace
from backend.worker.kv_storage import KVStorage
from tests.mutants.changes import Plant, change

ENGINE = ["tests/engine/test_swapping.py"]
MODEL = ["tests/model/test_swapping.py"]

# name -> (what plants it, tests that must fail)
MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "places_outlive_a_failed_step": (
        change(SwapSpace, "lose_everything", ("self._held.clear()", "return")),
        ENGINE,
    ),
    "kv_comes_back_in_the_layers_of_others": (
        change(KVStorage, "swap_in", ("zip(self.pools, self._host[number]", "zip(self.pools[::-1], self._host[number]")),
        MODEL,
    ),
}  # fmt: skip
