"""A weight rounded as a checkpoint of a scheme has it, and what that does to a layer's outputs."""

from __future__ import annotations

from torch import Tensor

from backend.quant.calibration import Inputs
from backend.quant.grids import CLIP_RATIOS, Grid, clipped, compensated, nearest, values
from backend.quant.schemes import Scheme
from kernels.common.quantize import dequantize, quantize_activations


def round_to(scheme: Scheme, weight: Tensor, inputs: Inputs | None) -> tuple[Tensor, Grid]:
    """weight [n, k] -> (q [n, k], its grid). Without inputs to go by, all of the range and to nearest."""
    groups = scheme.groups(weight.shape[1])
    if inputs is None:
        grid = scheme.grid(weight, weight.new_ones(len(weight), groups))
        return nearest(weight, grid), grid
    ratios = CLIP_RATIOS if scheme.bits == 4 else (1.0,)  # of 8 bits, no error is lower with less of the range
    grid = clipped(weight, scheme.grid, groups, inputs.hessian.diagonal(), ratios)
    return compensated(weight, grid, inputs.hessian), grid


def output_error(weight: Tensor, inputs: Inputs, scheme: Scheme, as_written: bool) -> float:
    """Of the rounded weight and rounded inputs on the sample, relative: rms of the difference / rms.

    `as_written`: by `round_to` with these inputs, otherwise to nearest.
    """
    q, grid = round_to(scheme, weight, inputs if as_written else None)
    return error_of(weight, values(q, grid), inputs.sample, scheme)


def error_of(weight: Tensor, kept: Tensor, sample: Tensor, scheme: Scheme) -> float:
    """The same of a weight that has been rounded."""
    expected = sample @ weight.T
    return float((rounded(sample, scheme) @ kept.T - expected).norm() / expected.norm().clamp(min=1e-30))


def rounded(x: Tensor, scheme: Scheme) -> Tensor:
    """x [tokens, k] as the scheme's product reads it."""
    return dequantize(*quantize_activations(x, x.shape[1]), x.shape[1]) if scheme.has_int8_activations else x
