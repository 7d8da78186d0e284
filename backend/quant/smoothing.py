"""Which scales to fold into a layer (folds.py), found on the calibration text.

Of a linear layer with int8 activations, the inputs are divided by s and the columns multiplied by it, so that what stands out
of the inputs is shared with the weights (SmoothQuant, Xiao et al., 2023):

    s_j = max |x_j|^a / max |w_j|^(1 - a)

`a` is the one of a few for which the layer's output on the sample changes least when both are rounded to nearest. It is folded
if the output then also changes less with the weights as they will be written (rounding.py) than without a scale. Where
activations stay floats there is nothing to share: AWQ's scales (Lin et al., 2023) were tried as well, and after GPTQ's rounding
(grids.py) the error of the outputs was larger with them than without.

Keys are divided by max |key|^0.5 (SmoothAttention: QServe, Lin et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from backend.models.config import ModelConfig
from backend.quant.calibration import Inputs
from backend.quant.rounding import output_error
from backend.quant.schemes import Scheme

EXPONENTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
KEY_EXPONENT = 0.5
MIN_SCALE, MAX_SCALE = 1e-3, 1e3  # of a scale, when their geometric mean is 1
Tie = Callable[[Tensor], Tensor]  # a statistic of each channel -> the same for those that must have one scale


def best_scale(inputs: Inputs, weight: Tensor, scheme: Scheme, tie: Tie = lambda x: x) -> Tensor | None:
    """weight [n, k]: all that reads these inputs, stacked -> [k], or None where no scale is better."""

    def error(scale: Tensor, as_written: bool) -> float:
        return output_error(weight * scale, inputs.divided(scale), scheme, as_written)

    none = torch.ones_like(inputs.most)
    best = min(_candidates(inputs, weight, tie), key=lambda scale: error(scale, as_written=False))
    return best if error(best, as_written=True) < error(none, as_written=True) else None


def key_scale(keys: Tensor, config: ModelConfig) -> Tensor:
    """keys [kv_heads, head_dim]: the greatest of each channel -> like it: one scale for i and i + head_dim / 2."""
    pairs = keys.unflatten(1, (2, -1)).amax(1)
    if config.qk_norm:
        pairs = pairs.amax(0, keepdim=True).expand_as(pairs)
    return _balanced(pairs**KEY_EXPONENT).repeat(1, 2)


def _candidates(inputs: Inputs, weight: Tensor, tie: Tie) -> Iterator[Tensor]:
    most, of_weight = tie(inputs.most), tie(weight.abs().amax(0))
    for exponent in EXPONENTS:
        yield _balanced(most**exponent / of_weight.clamp(min=1e-9) ** (1 - exponent))


def _balanced(scale: Tensor) -> Tensor:
    """With a geometric mean of 1 over each row, and within bounds; channels that are always 0 are left alone."""
    logarithms = torch.where(scale > 0, scale, 1).log()
    return (logarithms - logarithms.mean(-1, keepdim=True)).exp().clamp(MIN_SCALE, MAX_SCALE)
