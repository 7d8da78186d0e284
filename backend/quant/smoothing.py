"""Finds the scales to fold into a layer (folds.py) on the calibration text.

The inputs of a linear layer with int8 activations are divided by s and its columns multiplied by s, which moves a part of the
outliers from the inputs to the weights (SmoothQuant, Xiao et al., 2023):

    s_j = max |x_j|^a / max |w_j|^(1 - a)

`a` is chosen from EXPONENTS: the one with the lowest error of the output on the sample, inputs and weights rounded to nearest.
The scale is folded if the error is also lower than without a scale when the weights are rounded as they will be written
(rounding.py). Layers whose activations stay floats get no scale: AWQ's scales (Lin et al., 2023) were tried, and after GPTQ's
rounding (grids.py) the error of the outputs was larger with them than without.

Keys are divided by max |key|^0.5 (SmoothAttention: QServe, Lin et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.quant.calibration import Inputs
from backend.quant.rounding import output_error
from backend.quant.schemes import Scheme

EXPONENTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
KEY_EXPONENT = 0.5
MIN_SCALE, MAX_SCALE = 1e-3, 1e3  # the bounds of scales whose geometric mean is 1
Tie = Callable[[Tensor], Tensor]  # makes a statistic of each channel equal for the channels that share a scale


def best_scale(inputs: Inputs, weight: Tensor, scheme: Scheme, tie: Tie = lambda x: x) -> Tensor | None:
    """The scale [k] of these inputs, or None if none lowers the error. weight [n, k] stacks all layers that read the inputs."""

    def error(scale: Tensor, as_written: bool) -> float:
        return output_error(weight * scale, inputs.divided(scale), scheme, as_written)

    none = torch.ones_like(inputs.max_abs)
    best = min(_candidates(inputs, weight, tie), key=lambda scale: error(scale, as_written=False))
    return best if error(best, as_written=True) < error(none, as_written=True) else None


def key_scale(keys: Tensor, config: ModelConfig) -> Tensor:
    """The scale [kv_heads, head_dim] of keys, equal for what RoPE turns together. keys [kv_heads, head_dim]: max |key|.

    The first layer's rope counts: `config` is that of one layer.
    """
    turned = _turned_together(config)
    groups = keys.new_zeros(len(keys), int(turned.max()) + 1)
    groups = groups.scatter_reduce(1, turned.expand_as(keys), keys, "amax")
    if config.block.qk_norm == "head":
        groups = groups.amax(0, keepdim=True).expand_as(groups)
    return _balanced(groups**KEY_EXPONENT)[:, turned]


def _turned_together(config: ModelConfig) -> Tensor:
    """A number for each channel of a head, int64 [head_dim], the same for two channels that RoPE turns together."""
    rope = config.layers[0].rope
    rotary_dim = 0 if rope is None else config.ropes[rope].rotary_dim or config.head_dim
    pairs = torch.arange(rotary_dim // 2)
    turned = pairs.repeat_interleave(2) if config.block.rope_interleaved else pairs.repeat(2)
    return torch.cat((turned, torch.arange(len(pairs), len(pairs) + config.head_dim - rotary_dim)))


def _candidates(inputs: Inputs, weight: Tensor, tie: Tie) -> Iterator[Tensor]:
    max_abs, of_weight = tie(inputs.max_abs), tie(weight.abs().amax(0))
    for exponent in EXPONENTS:
        yield _balanced(max_abs**exponent / of_weight.clamp(min=1e-9) ** (1 - exponent))


def _balanced(scale: Tensor) -> Tensor:
    """Bring the geometric mean of each row to 1, then clamp to the bounds. A channel that is always 0 counts as 1."""
    logarithms = torch.where(scale > 0, scale, 1).log()
    return (logarithms - logarithms.mean(-1, keepdim=True)).exp().clamp(MIN_SCALE, MAX_SCALE)
