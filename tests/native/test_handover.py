"""How the stages of a pipeline wait for each other inside the native step."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.config.schema import KvCacheConfig, ModelConfigSection
from backend.architectures.description import WHOLE, Shard
from backend.models import loader
from backend.worker.loaded_model import LoadedModel
from kernels.cpu.build import NativeLibrary
from kernels.cpu.given import Passing
from kernels.cpu.ranks import LostRank, RankPlace, RanksMemory, RanksShape
from tests.native.harness import CPU
from tools.make_random_model import TINY, make_random_model

STAGES, LENGTH, LIMIT_S = 3, 64, 0.5
ROWS = np.array([[0, 0, 20, 1]], dtype=np.int32)
SHAPE = RanksShape(1, STAGES, 1, LENGTH, TINY["hidden_size"], TINY["vocab_size"], 1, LENGTH, 2)


class Stage:
    """A stage, which runs the same prompt in every step."""

    def __init__(self, directory: Path, shard: Shard, memory: RanksMemory | None = None) -> None:
        checkpoint = loader.open_directory(directory)
        checkpoint.cut(shard)
        section = ModelConfigSection(path=str(directory), kernels="native", device="cpu")
        loaded = LoadedModel(checkpoint, section, KvCacheConfig(), CPU)
        self._decoder = loaded.native_tier(32, memory)._decoder
        self._pools = loaded.storage(32, 2).pools
        self._passing = Passing() if memory is None else Passing(memory.entering, memory.leaving)

    def step(self) -> tuple[NDArray[np.int64], Tensor | None]:
        ids, tables = torch.arange(LENGTH)[None] * 7 % 100, np.array([[0, 1]], dtype=np.int32)
        return self._decoder.step(ROWS, ids, tables, self._pools, True, passing=self._passing)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_random_model(tmp_path, max_position_embeddings=LENGTH)


@pytest.fixture
def stages(best_kernels: NativeLibrary, directory: Path) -> list[Stage]:
    places = [RankPlace(stage=stage) for stage in range(STAGES)]
    first = RanksMemory(best_kernels, SHAPE, places[0], LIMIT_S)
    others = [RanksMemory(best_kernels, SHAPE, place, LIMIT_S, first.descriptor) for place in places[1:]]
    shards = [Shard(stage=stage, stages=STAGES) for stage in range(STAGES)]
    made = [Stage(directory, shard, memory) for shard, memory in zip(shards, (first, *others), strict=True)]
    first.close()
    return made


def test_a_stage_may_take_longer_than_the_limit_while_one_before_it_works(directory: Path, stages: list[Stage]) -> None:
    first, second, last = stages

    def work() -> None:
        until = time.monotonic() + 4 * LIMIT_S
        while time.monotonic() < until:
            first.step()
        second.step()

    worker = threading.Thread(target=work)
    started = time.monotonic()
    worker.start()
    try:
        tokens, logits = last.step()
    finally:
        worker.join()
    assert time.monotonic() - started >= 4 * LIMIT_S
    expected, of_whole = Stage(directory, WHOLE).step()
    assert tokens.tolist() == expected.tolist()
    assert logits is not None and of_whole is not None and torch.equal(logits, of_whole)


@pytest.mark.parametrize("handed_on, lost", [(0, 2), (1, 1)])
def test_the_first_stage_that_has_not_handed_on_is_lost(stages: list[Stage], handed_on: int, lost: int) -> None:
    """Rank 0 is in the last stage. Every later step of any stage fails, and names the lost rank."""
    for stage in stages[:handed_on]:
        stage.step()
    started = time.monotonic()
    with pytest.raises(LostRank) as error:
        stages[-1].step()
    assert error.value.rank == lost and time.monotonic() - started >= LIMIT_S
    for stage in stages:
        with pytest.raises(LostRank, match=f"rank {lost} is lost"):
            stage.step()
