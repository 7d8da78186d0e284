"""How much the inputs of layers count when weights are rounded to four bits while a model is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.layers.linear import Linear, QuantizedWeight, Weight, make_torch_linear
from backend.models.linears import LinearOptions
from backend.models.loader import DEFAULT_MODEL, load_directory, open_directory
from backend.quant import importance
from backend.quant.folds import kinds
from kernels.common.rounding import round_weight
from tools.make_random_model import make_random_model

ROWS = torch.randint(100, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "olmo2", "phi3", "granite"])
def test_every_projection_of_a_layer_has_the_importance_of_its_inputs(family: str, tmp_path: Path) -> None:
    directory = make_random_model(tmp_path / family, family)
    checkpoint = open_directory(directory)
    config: ModelConfig = checkpoint.config
    found = importance.measured(config, checkpoint.tensors, ROWS)
    wanted = {
        f"{config.names.layers}{index}.{name}"
        for index in range(config.num_layers)
        for names in kinds(config).values()
        for name in names
    }
    assert set(found) == wanted
    for name, each in found.items():
        assert each.shape == (checkpoint.tensors[name + ".weight"].shape[1],) and (each > 0).all()


def test_a_model_is_rounded_by_the_importance_of_each_layer_s_inputs(tmp_path: Path) -> None:
    directory = make_random_model(tmp_path / "llama", "llama")
    checkpoint = open_directory(directory)
    of_inputs = {
        name: torch.rand(len(each)) ** 4 + 1e-6
        for name, each in importance.measured(checkpoint.config, checkpoint.tensors, ROWS).items()
    }
    made: list[Weight] = []

    def make(weight: Weight, bias: Tensor | None) -> Linear:
        made.append(weight)
        return make_torch_linear(weight, bias)

    options = LinearOptions("w4a8", make=make, importance=of_inputs.get)
    load_directory(directory, None, "float32", torch.device("cpu"), options)
    down = [
        each
        for each in made
        if isinstance(each, QuantizedWeight) and each.q.shape[1] == checkpoint.config.intermediate_size
    ]
    assert len(down) == checkpoint.config.num_layers
    for index, each in enumerate(down):
        name = f"model.layers.{index}.mlp.down_proj"
        q, scale, _ = round_weight(checkpoint.tensors[name + ".weight"], "w4a8", of_inputs[name])
        assert torch.equal(each.q, q) and torch.equal(each.scale, scale)


def test_channels_with_larger_inputs_count_more_in_coarse_steps() -> None:
    found = importance.coarse(torch.tensor([1.0, 1.01, 4.0, 0.0]))
    assert found[0] == found[1] and found[2] / found[0] == pytest.approx(4) and 0 < found[3] < 1e-5 * found[0]
    steps = importance.coarse(torch.rand(100)).log2() * importance.STEPS
    assert torch.allclose(steps, steps.round(), atol=1e-5)


def test_a_model_without_a_tokenizer_reads_tokens_at_random(tmp_path: Path) -> None:
    rows = importance.token_rows(tmp_path, 50)
    assert rows.shape == (importance.ROWS, importance.ROW_TOKENS) and int(rows.max()) < 50
    assert torch.equal(rows, importance.token_rows(tmp_path, 50)), "every rank has the same"
    own = importance.token_rows(DEFAULT_MODEL, 4096)
    assert own.shape == rows.shape and not torch.equal(own, rows)


def test_weights_that_cannot_be_run_count_alike_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_random_model(tmp_path / "llama", "llama")
    checkpoint = open_directory(directory)
    broken = {name: tensor * float("nan") for name, tensor in checkpoint.tensors.items()}
    asked = importance.Importance(directory, checkpoint.config, broken, lambda line: None)
    with caplog.at_level(logging.WARNING):
        assert asked("model.layers.0.mlp.down_proj") is None
    assert "which costs quality" in caplog.text
