"""Modules that one native call computes: which ones are found, and what they compute."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path

import pytest
import transformers
from torch import Tensor, nn

from backend.hosted.model import HostedModel
from tests.hosted.harness import hosted_driver
from tests.hosted.tiny import save, tiny_model
from tests.native.harness import Format

# Model type -> how many modules of each class one native call computes, in a model of two layers.
FOUND = {
    "llama": {"LlamaRMSNorm": 5, "LlamaAttention": 2, "LlamaMLP": 2},
    "qwen3_moe": {"Qwen3MoeRMSNorm": 9, "Qwen3MoeAttention": 2, "Qwen3MoeExperts": 2},
    "gpt_oss": {"GptOssRMSNorm": 5, "GptOssAttention": 2},
    "glm4_moe": {"Glm4MoeRMSNorm": 5, "Glm4MoeAttention": 2, "Glm4MoeMLP": 2, "Glm4MoeExperts": 1},
    "gpt2": {},
}


def found(model: HostedModel) -> dict[str, int]:
    assert model.natives is not None
    return model.natives.found


@pytest.mark.parametrize("kind", FOUND)
def test_modules_that_are_made_of_the_known_parts_are_native(tmp_path: Path, kernels: CDLL, kind: str) -> None:
    driver = hosted_driver(save(tiny_model(kind), tmp_path), kernels, Format())
    assert found(driver.runner.tier.model) == FOUND[kind]


def test_a_module_that_computes_something_else_is_left_alone(
    tmp_path: Path, kernels: CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = transformers.models.llama.modeling_llama
    for module, factor in ((kind.LlamaRMSNorm, 1.001), (kind.LlamaMLP, 0.999)):

        def forward(self: nn.Module, x: Tensor, own=module.forward, factor=factor) -> Tensor:  # noqa: ANN001
            return own(self, x) * factor

        monkeypatch.setattr(module, "forward", forward)
    driver = hosted_driver(save(tiny_model("llama"), tmp_path), kernels, Format())
    assert found(driver.runner.tier.model) == {"LlamaAttention": 2}


def test_a_module_with_a_threshold_is_left_alone(tmp_path: Path, kernels: CDLL) -> None:
    """Its values are far from the threshold, so that a trial alone would not show it."""
    model = tiny_model("olmo", clip_qkv=1e4)
    driver = hosted_driver(save(model, tmp_path), kernels, Format())
    assert found(driver.runner.tier.model) == {"OlmoMLP": 2}


def test_a_scale_that_begins_at_a_late_position_is_found(tmp_path: Path, kernels: CDLL) -> None:
    """Ministral 3 scales queries from original_max_position_embeddings on."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 100,
        "llama_4_scaling_beta": 0.5,
    }
    driver = hosted_driver(save(tiny_model("ministral3", rope_parameters=rope), tmp_path), kernels, Format())
    assert "Ministral3Attention" not in found(driver.runner.tier.model)
