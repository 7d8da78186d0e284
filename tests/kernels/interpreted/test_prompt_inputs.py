"""Prompts with embeddings or positions of their own on the triton tier, in the interpreter. The torch tier is the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backend.api import EngineConfig, Request, TensorData
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.engine.core import EngineCore
from backend.worker.group import InProcessWorkerGroup
from tests.kernels.interpreted.test_device_runner import BLOCK_SIZE, directory, finish  # noqa: F401 (fixture)


def make_core(path: Path, kernels: str) -> EngineCore:
    config = EngineConfig(
        ModelConfigSection(path=str(path), dtype="float32", device="cpu", kernels=kernels),
        KvCacheConfig(block_size=BLOCK_SIZE, max_tokens=60 * BLOCK_SIZE, watermark=0.0),
        SchedulerConfig(max_batch_size=8, max_num_tokens=24),
    )
    return EngineCore(config, InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache))


@pytest.mark.feature("000-18")
def test_prompt_inputs_on_the_triton_tier_are_those_of_the_torch_tier(
    directory: Path,  # noqa: F811 (fixture)
) -> None:
    """Steps that only generate would replay a graph, which rotates by the tokens' places: rows with positions run eagerly."""
    tokens: dict[str, list[list[int]]] = {}
    for kernels in ("torch", "triton"):
        core = make_core(directory, kernels)
        vocab, width = core.model.vocab_size, core.model.prompt_embedding_width
        values = np.random.default_rng(1).normal(0, 0.5, (2, width)).astype(np.float32)
        table = TensorData("float32", (2, width), values.tobytes())
        requests = [
            Request([5, 6, 7], 3),
            Request([5, vocab, vocab + 1], 3, prompt_embeddings=table),
            Request([5, 6, 7], 3, position_ids=[2, 9, 17]),
        ]
        tokens[kernels] = [list(each.output_token_ids[0]) for each in finish(core, requests)]
    assert tokens["triton"] == tokens["torch"]
    assert len({tuple(each[3:]) for each in tokens["torch"]}) == 3
