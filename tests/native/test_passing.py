"""Hidden states that enter and leave the native step: two halves of a model compute the bits of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.config.kv_bits import named
from backend.api.config.schema import KvCacheConfig, ModelConfigSection
from backend.architectures.description import WHOLE, Shard
from backend.models import loader
from backend.worker.loaded_model import LoadedModel
from kernels.cpu.build import NativeLibrary
from kernels.cpu.decoder import NativeDecoder, UnknownCell
from kernels.cpu.given import Passing
from tests.native.harness import CPU, Format
from tools.make_random_model import make_random_model

ROWS = np.array([[0, 0, 7, 2], [2, 0, 1, 0], [1, 0, 40, 40]], dtype=np.int32)
TOKENS, LOGITS, HIDDEN = 48, 42, 48


class Part:
    """The layers of a shard, with pools of their own."""

    def __init__(self, directory: Path, form: Format, shard: Shard = WHOLE) -> None:
        checkpoint = loader.open_directory(directory)
        checkpoint.cut(shard)
        section = ModelConfigSection(
            path=str(directory), dtype=form.dtype, quantization=form.quantization, kernels="native", device="cpu"
        )
        loaded = LoadedModel(checkpoint, section, KvCacheConfig(**named(form.kv)), CPU)
        self.decoder: NativeDecoder = loaded.native_tier(32)._decoder
        self.pools = loaded.storage(32, 6).pools

    def run(self, ids: Tensor, tables: NDArray[np.int32], passing: Passing) -> tuple[NDArray[np.int64], Tensor | None]:
        return self.decoder.step(ROWS, ids, tables, self.pools, True, passing=passing)


@pytest.fixture
def directory(best_kernels: NativeLibrary, tmp_path: Path) -> Path:
    return make_random_model(tmp_path, "gemma3", num_hidden_layers=4, hidden_size=HIDDEN, max_position_embeddings=64)


@pytest.fixture
def slots() -> tuple[Tensor, NDArray[np.int32]]:
    ids = torch.arange(3 * 64).view(3, 64) * 7 % 100
    return ids, np.array([[0, 1], [2, 3], [4, 5]], dtype=np.int32)


@pytest.mark.parametrize(
    "form",
    [Format(), Format("bfloat16"), Format("bfloat16", "w8a8", kv="int8"), Format("bfloat16", "w4a8")],
    ids=str,
)
def test_two_halves_compute_the_bits_of_the_whole(
    directory: Path, slots: tuple[Tensor, NDArray[np.int32]], form: Format
) -> None:
    tokens, logits = Part(directory, form).run(*slots, Passing())
    passed = torch.full((TOKENS, HIDDEN), torch.nan)
    first, last = (Part(directory, form, Shard(stage=stage, stages=2)) for stage in range(2))
    none, no_logits = first.run(*slots, Passing(leaving=passed))
    assert len(none) == 0 and no_logits is not None and len(no_logits) == 0
    assert not passed.isnan().any()
    again, same = last.run(*slots, Passing(entering=passed))
    assert again.tolist() == tokens.tolist() and logits is not None and logits.shape[0] == LOGITS
    assert torch.equal(same, logits)


def test_rows_are_looked_at_without_running_them(directory: Path, slots: tuple[Tensor, NDArray[np.int32]]) -> None:
    part, (ids, tables) = Part(directory, Format()), slots
    part.decoder.check(ROWS, ids, tables, part.pools)
    assert not any(pool.any() for pool in part.pools)
    ids[1, 39] = -1
    with pytest.raises(UnknownCell) as error:
        part.decoder.check(ROWS, ids, tables, part.pools)
    assert error.value.row == 2
