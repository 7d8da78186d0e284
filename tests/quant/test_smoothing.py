"""Scales are chosen by what they do to the outputs, and tied where a fold needs it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from backend.models.config import read_model_config
from backend.quant.calibration import Inputs
from backend.quant.grids import values
from backend.quant.rounding import error_of, output_error, round_to, rounded
from backend.quant.schemes import W4A8, W4A16, W8A8, Scheme
from backend.quant.smoothing import best_scale, key_scale
from tools.make_random_model import make_random_model


def inputs_of(x: Tensor) -> Inputs:
    return Inputs(x.abs().amax(0), x.T @ x / len(x), x)


def with_outliers(tokens: int, k: int) -> Tensor:
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(1))
    x[:, 3] *= 40
    x[:, 11] *= 15
    return x


def error_with(x: Tensor, weight: Tensor, scheme: Scheme, scale: Tensor) -> float:
    """The output's relative error when the weight is written with this scale."""
    kept = values(*round_to(scheme, weight * scale, inputs_of(x / scale)))
    expected = x @ weight.T
    return float((rounded(x / scale, scheme) @ kept.T - expected).norm() / expected.norm())


def test_outliers_are_smoothed_away() -> None:
    x, weight = with_outliers(200, 128), torch.randn(48, 128, generator=torch.Generator().manual_seed(2))
    for scheme, most in ((W8A8(), 0.5), (W4A8(per_group=True), 0.95)):
        scale = best_scale(inputs_of(x), weight, scheme)
        assert error_with(x, weight, scheme, scale) < most * error_with(x, weight, scheme, torch.ones(128))


def test_no_scale_is_taken_where_none_is_better() -> None:
    x = torch.eye(64) * 2  # inputs and weights like these are rounded exactly
    weight = torch.full((8, 64), 3.0)
    assert best_scale(inputs_of(x), weight, W8A8()) is None


def test_a_scale_is_the_same_where_it_is_tied() -> None:
    x, weight = with_outliers(100, 64), torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    pairs = lambda stat: stat.view(32, 2).amax(1, keepdim=True).expand(32, 2).flatten()
    scale = best_scale(inputs_of(x), weight, W8A8(), pairs)
    assert torch.equal(scale[0::2], scale[1::2]) and scale.unique().numel() > 16


def test_keys_have_one_scale_for_what_rope_turns_together(tmp_path: Path) -> None:
    keys = torch.rand(2, 16, generator=torch.Generator().manual_seed(4)) + 0.1
    keys[1, 3] = 50
    config = read_model_config(make_random_model(tmp_path / "llama", head_dim=16))
    scale = key_scale(keys, config)
    assert torch.equal(scale[:, :8], scale[:, 8:])
    for head, channel in ((0, 0), (1, 3), (1, 7)):
        largest = [max(keys[head, i].item(), keys[head, i + 8].item()) for i in range(8)]
        mean = torch.tensor(largest).log().mean().exp()
        assert abs(scale[head, channel] - (largest[channel] / mean) ** 0.5) < 1e-5
    normed = read_model_config(make_random_model(tmp_path / "qwen3", "qwen3"))
    assert torch.equal(key_scale(keys, normed)[0], key_scale(keys, normed)[1])


def test_an_error_of_outputs_is_relative() -> None:
    x, weight = torch.randn(20, 32), torch.randn(8, 32)
    scheme = W4A16(32, True, torch.float32)
    assert error_of(weight, weight, x, scheme) == 0
    assert abs(error_of(weight, 1.25 * weight, x, scheme) - 0.25) < 1e-5
    assert 0 < output_error(weight, inputs_of(x), scheme, True) < output_error(weight, inputs_of(x), scheme, False)
