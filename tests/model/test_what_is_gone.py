"""What a worker lets go must be gone: adapters that left, the pool after a shutdown, and tensors that found no room."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from backend.core.step import PreparedAdapter, StepInput
from backend.worker.adapters import DeviceAdapters
from backend.worker.debug_tensors import DebugFetch
from backend.worker.input_batch import InputBatch
from tests.model.test_worker import GroupDriver
from tests.model.tiers import TierCase


class Placed:
    """An adapter on a device."""


def test_an_adapter_that_left_is_released_once_and_held_by_nobody() -> None:
    released: list[str] = []
    placed: dict[str, weakref.ref[Placed]] = {}

    def place(adapter: PreparedAdapter) -> Placed:
        made = Placed()
        placed[adapter.content] = weakref.ref(made)
        return made

    names: dict[int, str] = {}
    adapters = DeviceAdapters(place, lambda made: released.append(names[id(made)]))
    both = [PreparedAdapter(content, 4, 1, 1, None) for content in ("a", "b")]
    adapters.update(StepInput(0, [], adapters_in=both))
    names.update({id(made()): content for content, made in placed.items()})
    adapters.update(StepInput(1, [], adapters_out=["a", "never there"]))
    adapters.update(StepInput(2, [], adapters_out=["a"]))
    gc.collect()
    assert released == ["a"]
    assert placed["a"]() is None and placed["b"]() is not None
    first = placed["b"]
    adapters.update(StepInput(3, [], adapters_in=both))
    assert placed["b"] is first, "one that is there already stays as it is"
    assert placed["a"]() is not None, "one that left comes anew"


def test_the_pool_and_the_weights_are_gone_after_a_shutdown(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    driver = GroupDriver.of(checkpoint("llama2"), tier)
    group = driver.group
    assert group.runner is not None and group.model is not None
    held = [weakref.ref(group.runner.storage.pools[0]), weakref.ref(group.model.embedding)]
    group.shutdown()
    del driver
    gc.collect()
    assert group.runner is None and group.model is None
    assert [each() for each in held] == [None, None]


def test_debug_tensors_of_a_step_share_the_room_that_it_has() -> None:
    """Each has 40 bytes: two of them and no third go into 100."""
    outputs = {name: torch.arange(10.0)[None] for name in ("first", "second", "third")}
    batch = InputBatch(1, 8, 4, torch.device("cpu"))
    for most, kept in ((39, 0), (40, 1), (79, 1), (80, 2), (100, 2), (120, 3)):
        told = DebugFetch(tuple(outputs), most).begin([], batch, outputs).wait()
        assert list(told) == list(outputs)[:kept]
