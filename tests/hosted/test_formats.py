"""Every type that a checkpoint is stored in, computed in every type and every format of weights: a result, and the right one."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.api.config.schema import KvCacheConfig, ModelConfigSection
from backend.worker.checkpoints import open_checkpoint
from backend.worker.loaded_model import LoadedModel
from tests.hosted.tiny import COMMON, save, tiny_model
from tests.native.harness import CPU, drive, prompt

KINDS = ("llama", "qwen3_moe", "gpt_oss")  # dense, and mixtures of experts with and without a native call
STORED = ("float32", "bfloat16", "float16")
COMPUTED = ("float32", "bfloat16", "float16")
# Largest difference from the stored weights' own logits in float64, as a part of their size: what is rounded, and how far.
ROUNDED = {"none": 0.05, "int8": 0.06, "w8a8": 0.1, "w6a8": 0.25, "w4a8": 0.5}
TOKENS = [3 + token for token in prompt(12, COMMON["vocab_size"] - 3)]


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Tensor]]:
    """A checkpoint of a model type in a type, and transformers' logits of it."""

    @cache
    def make(kind: str, dtype: str) -> tuple[Path, Tensor]:
        model = tiny_model(kind).to(getattr(torch, dtype))
        directory = save(model, tmp_path_factory.mktemp(f"{kind}_{dtype}"))
        with torch.inference_mode():
            return directory, model.float()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]

    return make


@pytest.mark.parametrize("quantization", ROUNDED)
@pytest.mark.parametrize(("dtype", "computed"), list(product(STORED, COMPUTED)))
@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_computes(
    stored: Callable, kernels: CDLL, kind: str, dtype: str, computed: str, quantization: str
) -> None:
    directory, expected = stored(kind, dtype)
    section = ModelConfigSection(path=str(directory), dtype=computed, quantization=quantization, kernels="native")
    loaded = LoadedModel(open_checkpoint(directory, "transformers"), section, KvCacheConfig(), CPU)
    driver = drive(loaded.tier(32), loaded.model, loaded.choice.library)
    driver.begin(0, TOKENS)
    logits = driver.run(0, [len(TOKENS)])
    assert (logits - expected).norm() <= ROUNDED[quantization] * expected.norm()


def test_experts_that_are_held_in_different_types_are_computed_in_one_call(stored: Callable, kernels: CDLL) -> None:
    """Numbers of bfloat16 that float16 has are held in it, expert by expert; all the others in float32."""
    directory, _ = stored("qwen3_moe", "bfloat16")
    section = ModelConfigSection(path=str(directory), dtype="float32", kernels="native")
    loaded = LoadedModel(open_checkpoint(directory, "transformers"), section, KvCacheConfig(), CPU)
    loaded.tier(32)
    assert loaded.model.natives.found["Qwen3MoeExperts"] == 2
