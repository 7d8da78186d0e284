"""Rounds a weight to the grid of a scheme, and measures the error of the layer's outputs."""

from __future__ import annotations

from torch import Tensor

from backend.quant.calibration import Inputs
from backend.quant.grids import CLIP_RATIOS, Grid, clipped, compensated, nearest, values
from backend.quant.schemes import Scheme
from kernels.common.quantize import dequantize, quantize_activations


def round_to(scheme: Scheme, weight: Tensor, inputs: Inputs | None) -> tuple[Tensor, Grid]:
    """Round weight [n, k]; returns q [n, k] and its grid. Without inputs the whole range is spanned, and q is the nearest."""
    groups = scheme.groups(weight.shape[1])
    if inputs is None:
        grid = scheme.grid(weight, weight.new_ones(len(weight), groups))
        return nearest(weight, grid), grid
    ratios = CLIP_RATIOS if scheme.bits == 4 else (1.0,)  # with 8 bits, clipping the range never lowers the error
    grid = clipped(weight, scheme.grid, groups, inputs.hessian.diagonal(), ratios)
    return compensated(weight, grid, inputs.hessian), grid


def output_error(weight: Tensor, inputs: Inputs, scheme: Scheme, as_written: bool) -> float:
    """The relative error of the outputs when weight and inputs are rounded: rms of the difference / rms, on the sample.

    With `as_written` the weight is rounded as in the written checkpoint, otherwise to nearest.
    """
    q, grid = round_to(scheme, weight, inputs if as_written else None)
    return error_of(weight, values(q, grid), inputs.sample, scheme)


def error_of(weight: Tensor, kept: Tensor, sample: Tensor, scheme: Scheme) -> float:
    """The relative error of the outputs when `kept` [n, k] stands in for `weight` [n, k] and the inputs are rounded."""
    expected = sample @ weight.T
    return float((rounded(sample, scheme) @ kept.T - expected).norm() / expected.norm().clamp(min=1e-30))


def rounded(x: Tensor, scheme: Scheme) -> Tensor:
    """x [tokens, k], rounded to int8 and back if the scheme has int8 activations."""
    return dequantize(*quantize_activations(x, x.shape[1]), x.shape[1]) if scheme.has_int8_activations else x
