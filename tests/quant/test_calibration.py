"""What is collected, against transformers' own forward pass with hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.api.errors import ConfigError
from backend.quant.calibration import Calibration, Inputs
from backend.quant.checkpoint import FloatCheckpoint
from tests.quant.models import DOWN, FAMILIES, GATE, OUT, Q, random_rows
from tools.make_random_model import make_random_model


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    directory = make_random_model(tmp_path / "model", family, **FAMILIES[family])
    rows = random_rows(shape=(6, 40))
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    seen: dict[str, torch.Tensor] = {}
    for name, module in theirs.named_modules():
        module.register_forward_hook(lambda _, given, out, name=name: seen.update({name: given[0] if given else None}))
    with torch.inference_mode():
        theirs(rows)
    source = FloatCheckpoint(directory)
    calibration = Calibration(source.config, source.embedding(), rows)
    for index in range(source.config.num_layers):
        found = calibration.advance(index, source.layer(index)[0])
        for inputs, name in ((found.qkv, Q), (found.out, OUT), (found.gate_up, GATE), (found.down, DOWN)):
            x = seen[f"model.layers.{index}.{name}"].flatten(0, 1)
            close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))
            close(inputs.max_abs, x.abs().amax(0))
            close(inputs.hessian, x.T @ x / len(x))
            assert inputs.sample.shape == (len(x), x.shape[1])  # a short text is kept as a whole


def test_keys_are_seen_as_the_cache_holds_them(tmp_path: Path) -> None:
    directory = make_random_model(tmp_path / "model")
    rows = random_rows(shape=(5, 40))
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        cache = theirs(rows, use_cache=True).past_key_values
    source = FloatCheckpoint(directory)
    calibration = Calibration(source.config, source.embedding(), rows)
    for index in range(source.config.num_layers):
        keys = calibration.advance(index, source.layer(index)[0]).keys
        torch.testing.assert_close(keys, cache.layers[index].keys.abs().amax((0, 2)), rtol=1e-4, atol=1e-4)


def test_a_long_text_is_sampled_from_all_of_it(tmp_path: Path) -> None:
    directory = make_random_model(tmp_path / "model")
    source = FloatCheckpoint(directory)
    rows = random_rows(shape=(12, 100))
    found = Calibration(source.config, source.embedding(), rows).advance(0, source.layer(0)[0])
    assert 500 <= len(found.qkv.sample) <= 512


def test_numbers_that_are_not_finite_are_told(tmp_path: Path) -> None:
    source = FloatCheckpoint(make_random_model(tmp_path / "model"))
    layer, _ = source.layer(1)
    layer[DOWN + ".weight"][0, 0] = float("nan")
    calibration = Calibration(source.config, source.embedding(), random_rows())
    calibration.advance(0, source.layer(0)[0])
    with pytest.raises(ConfigError, match="decoder layer 1 makes numbers that are not finite"):
        calibration.advance(1, layer)


def test_divided_inputs_are_the_statistics_of_divided_values() -> None:
    x = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    scale = torch.linspace(0.2, 3, 8)
    of = lambda x: Inputs(x.abs().amax(0), x.T @ x / len(x), x)
    for found, expected in zip(of(x).divided(scale), of(x / scale)):
        torch.testing.assert_close(found, expected)
