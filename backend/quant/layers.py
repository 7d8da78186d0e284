"""One decoder layer, smoothed and quantised."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backend.models.config import ModelConfig
from backend.quant.calibration import Inputs, LayerInputs
from backend.quant.folds import (
    DOWN,
    GATE,
    INPUT_NORM,
    OUT,
    POST_NORM,
    UP,
    K,
    Layer,
    Q,
    V,
    fold_key,
    fold_norm,
    fold_up,
    fold_value,
    one_per_kv_head,
)
from backend.quant.grids import CLIP_RATIOS, Grid, clipped, compensated, nearest, values
from backend.quant.schemes import Scheme
from backend.quant.smoothing import best_scale, key_scale, output_error

# kind -> the projections that read the same inputs
KINDS = {"qkv": (Q, K, V), "out": (OUT,), "gate_up": (GATE, UP), "down": (DOWN,)}


class Errors(NamedTuple):
    """Of the outputs of one kind of linear layer on the sample, relative."""

    plain: float  # rounded to nearest
    smoothed: float  # the same after smoothing
    written: float  # as the checkpoint has it


class Quantized(NamedTuple):
    tensors: Layer  # what the checkpoint holds of the layer, by names within it
    errors: dict[str, Errors]  # by kind; empty without calibration


def smooth(layer: Layer, inputs: LayerInputs, config: ModelConfig, scheme: Scheme, dtype: torch.dtype) -> LayerInputs:
    """Fold the best scales into all linear layers of a layer; their inputs as they are then. `dtype`: of stored norms."""

    def tied(x: Tensor) -> Tensor:
        of_heads = one_per_kv_head(x, config)
        return of_heads.amax(1, keepdim=True).expand_as(of_heads).flatten()

    found = inputs._asdict()
    for kind, norm in (("qkv", INPUT_NORM), ("gate_up", POST_NORM)):
        scale = best_scale(found[kind], stacked(layer, kind), scheme)
        if scale is not None:
            found[kind] = found[kind].divided(fold_norm(layer, norm, KINDS[kind], scale, dtype))
    scale = best_scale(found["out"], stacked(layer, "out"), scheme, tied)
    if scale is not None:
        fold_value(layer, scale, config)
        found["out"] = found["out"].divided(scale)
    scale = best_scale(found["down"], stacked(layer, "down"), scheme)
    if scale is not None:
        fold_up(layer, scale)
        found["down"] = found["down"].divided(scale)
    return LayerInputs(**found)


def stacked(layer: Layer, kind: str) -> Tensor:
    return torch.cat([layer[name + ".weight"] for name in KINDS[kind]])


def round_to(scheme: Scheme, weight: Tensor, inputs: Inputs | None) -> tuple[Tensor, Grid]:
    """weight [n, k] -> (q [n, k], its grid). Without inputs to go by, all of the range and to nearest."""
    groups = scheme.groups(weight.shape[1])
    if inputs is None:
        grid = scheme.grid(weight, weight.new_ones(len(weight), groups))
        return nearest(weight, grid), grid
    ratios = CLIP_RATIOS if scheme.bits == 4 else (1.0,)  # of 8 bits, no error is lower with less of the range
    grid = clipped(weight, scheme.grid, groups, inputs.hessian.diagonal(), ratios)
    return compensated(weight, grid, inputs.hessian), grid


def quantize_layer(
    layer: Layer, inputs: LayerInputs | None, config: ModelConfig, scheme: Scheme, dtype: torch.dtype, int4_keys: bool
) -> Quantized:
    """`layer` is used up. `inputs`: None = round to nearest, and no folds. `dtype`: of the tensors that stay floats."""
    plain = {}
    if inputs is not None:
        plain = {kind: _nearest_error(layer, getattr(inputs, kind), scheme, kind) for kind in KINDS}
        if int4_keys:
            fold_key(layer, key_scale(inputs.keys, config), config)
        if scheme.has_int8_activations:
            inputs = smooth(layer, inputs, config, scheme, dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in layer.items()}
    errors = {}
    for kind, names in KINDS.items():
        weight, of_kind = stacked(layer, kind), inputs and getattr(inputs, kind)
        q, grid = round_to(scheme, weight, of_kind)
        rows = [len(tensors.pop(name + ".weight")) for name in names]
        for name, part, of_part in zip(names, q.split(rows), grid.split(rows)):
            tensors |= scheme.tensors(name, part, of_part)
        if of_kind is not None:
            smoothed = _nearest_error(layer, of_kind, scheme, kind)
            errors[kind] = Errors(plain[kind], smoothed, output_error(of_kind.sample, weight, values(q, grid), scheme))
    return Quantized(tensors, errors)


def _nearest_error(layer: Layer, inputs: Inputs, scheme: Scheme, kind: str) -> float:
    weight = stacked(layer, kind)
    q, grid = round_to(scheme, weight, None)
    return output_error(inputs.sample, weight, values(q, grid), scheme)
