"""Smooths and quantises one decoder layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.quant.calibration import LayerInputs
from backend.quant.folds import Layer, fold_key, fold_norm, fold_up, fold_value, kinds, norms, one_per_kv_head
from backend.quant.grids import values
from backend.quant.rounding import error_of, output_error, round_to
from backend.quant.schemes import Scheme
from backend.quant.smoothing import best_scale, key_scale


class Errors(NamedTuple):
    """Relative errors of the outputs of one kind of linear layer on the sample."""

    plain: float  # with weights rounded to nearest
    smoothed: float  # with weights smoothed, then rounded to nearest
    written: float  # with the weights of the written checkpoint


class Quantized(NamedTuple):
    tensors: Layer  # the layer's tensors in the written checkpoint, by names within the layer
    errors: dict[str, Errors]  # kind -> errors; empty without calibration


def smooth(layer: Layer, inputs: LayerInputs, config: ModelConfig, scheme: Scheme, dtype: torch.dtype) -> LayerInputs:
    """Fold the best scales into the linear layers of a decoder layer. Returns the inputs that the linear layers have then.

    `dtype` is the type in which norms are stored. What `folds.obstacles` names stays as it is.
    """
    offset, of_kinds = config.block.norm_offset, kinds(config)

    def tied(x: Tensor) -> Tensor:
        of_heads = one_per_kv_head(x, config)
        return of_heads.amax(1, keepdim=True).expand_as(of_heads).flatten()

    found = inputs._asdict()
    for norm, readers in norms(config):
        linears = tuple(name for kind in readers for name in of_kinds[kind])
        scale = None if norm is None else best_scale(found[readers[0]], stacked(layer, linears), scheme)
        if norm is not None and scale is not None:
            folded = fold_norm(layer, norm, linears, scale, dtype, offset)
            found |= {kind: found[kind].divided(folded) for kind in readers}
    scale = best_scale(found["out"], stacked(layer, of_kinds["out"]), scheme, tied)
    if scale is not None:
        fold_value(layer, scale, config)
        found["out"] = found["out"].divided(scale)
    scale = best_scale(found["down"], stacked(layer, of_kinds["down"]), scheme) if config.block.gated else None
    if scale is not None:
        fold_up(layer, scale, config)
        found["down"] = found["down"].divided(scale)
    return LayerInputs(**found)


def stacked(layer: Layer, names: tuple[str, ...]) -> Tensor:
    """The weights of these projections as one weight [n, k]."""
    return torch.cat([layer[name + ".weight"] for name in names])


def quantize_layer(
    layer: Layer, inputs: LayerInputs | None, config: ModelConfig, scheme: Scheme, dtype: torch.dtype, int4_keys: bool
) -> Quantized:
    """Smooth and quantise a decoder layer; the tensors of `layer` are changed.

    Without `inputs` all weights are rounded to nearest, and nothing is smoothed. `config` is that of this layer alone.
    `dtype` is that of tensors that stay floats.
    """
    of_kinds = kinds(config)
    plain = {}
    if inputs is not None:
        plain = {
            kind: output_error(stacked(layer, names), getattr(inputs, kind), scheme, as_written=False)
            for kind, names in of_kinds.items()
        }
        if int4_keys:
            fold_key(layer, key_scale(inputs.keys, config), config)
        if scheme.has_int8_activations:
            inputs = smooth(layer, inputs, config, scheme, dtype)
    projections = {name + ".weight" for names in of_kinds.values() for name in names}
    tensors = {name: tensor.to(dtype) for name, tensor in layer.items() if name not in projections}
    errors = {}
    for kind, names in of_kinds.items():
        weight, of_kind = stacked(layer, names), inputs and getattr(inputs, kind)
        q, grid = round_to(scheme, weight, of_kind)
        rows = [len(layer[name + ".weight"]) for name in names]
        for name, part, of_part in zip(names, q.split(rows), grid.split(rows)):
            tensors |= scheme.tensors(name, part, of_part)
        if of_kind is not None:
            smoothed = output_error(weight, of_kind, scheme, as_written=False)
            written = error_of(weight, values(q, grid), of_kind.sample, scheme)
            errors[kind] = Errors(plain[kind], smoothed, written)
    return Quantized(tensors, errors)
