"""Random tiny checkpoints of every family, and transformers as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model.tiers import kernels, native_kernels, tier  # noqa: F401 (fixtures)
from tools.make_random_model import make_random_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": dict(family="llama"),
    "llama2_biases_odd_heads": dict(
        family="llama",
        hidden_size=60,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=20,
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama_linear_rope_no_groups": dict(
        family="llama",
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=6,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="linear", rope_theta=10_000.0, factor=3.0),
    ),
    "llama3_tied_sharded": dict(family="llama3", num_shards=3),
    "mistral": dict(family="mistral"),
    "qwen2": dict(family="qwen2"),
    "qwen2_window_from_second_layer": dict(
        family="qwen2", use_sliding_window=True, sliding_window=13, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": dict(family="qwen3"),
}


class Oracle:
    """transformers' float32 logits of whole sequences."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """Returns logits [len(tokens), vocab]."""
        return self.model(torch.tensor([tokens])).logits[0]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_random_model(tmp_path_factory.mktemp(name), seed=len(name), **FAMILIES[name])
        return made[name]

    return make


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> tuple[Path, Oracle]:
    """(checkpoint directory, oracle) of each family in turn."""
    directory = checkpoint(request.param)
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return directory, Oracle(model)
