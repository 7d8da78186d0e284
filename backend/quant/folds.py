"""Moves scales between the tensors of a decoder layer without changing what the layer computes.

A `Layer` maps names within the layer to float32 tensors. Every function here divides the inputs of a linear layer by a scale and
multiplies its columns by the same scale, so that the output of the decoder layer stays the same but for rounding. The division
is folded into the tensors that make those inputs:

    norm -> qkv, gate_up     the norm's weight, and its bias, are divided (SmoothQuant, Xiao et al., 2023). Layers that read the
                             same norm share a scale
    value -> out             the rows of v are divided; a value channel reaches the columns of o for every query head of its kv
                             head, so that those share a scale
    up -> down               the rows of up are divided, because act(gate) * up is linear in up
    key -> query             the rows of k are divided, those of q multiplied (SmoothAttention, QServe, Lin et al., 2024). RoPE
                             mixes two channels of a pair, so that they share a scale. Where q and k are normalised (Qwen3,
                             OLMo 2), the weights of these norms are changed instead; all heads share those of a head

`obstacles` says which of these a description does not allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from backend.architectures.description import ModelConfig

Layer = dict[str, Tensor]


class FoldPart(NamedTuple):
    """A projection's place in the checkpoint."""

    name: str  # name of the tensor within the layer, without `.weight`
    rows: slice


def stored_layer(tensors: Mapping[str, Tensor], config: ModelConfig, index: int) -> Layer:
    """The tensors of decoder layer `index` as they are stored, by their names within the layer, without computed frequencies."""
    prefix = f"{config.names.layers}{index}."
    return {
        name.removeprefix(prefix): tensors[name]
        for name in tensors
        if name.startswith(prefix) and not name.endswith("rotary_emb.inv_freq")
    }


def kinds(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """kind -> the stored projections that read the same inputs."""
    names = config.names.layer
    return {"qkv": names.qkv, "out": (names.out,), "gate_up": names.gate_up, "down": (names.down,)}


def parts(config: ModelConfig) -> dict[str, FoldPart]:
    """Where q, k, v, gate and up are stored: in a tensor of their own, or in one for all."""
    q, kv, inter = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    names, found = config.names.layer, {}
    inputs = {"gate": inter, "up": inter} if config.block.gated else {"up": inter}
    for stored, rows in ((names.qkv, {"q": q, "k": kv, "v": kv}), (names.gate_up, inputs)):
        first = 0
        for index, (part, count) in enumerate(rows.items()):
            is_alone = len(stored) == len(rows)
            found[part] = FoldPart(stored[index if is_alone else 0], slice(0 if is_alone else first, first + count))
            first = 0 if is_alone else first + count
    return found


def norms(config: ModelConfig) -> list[tuple[str | None, tuple[str, ...]]]:
    """The norms before linear layers, None for an absent one, each with the kinds of linear layers that read it."""
    names = config.names.layer
    if config.block.parallel and names.mlp_norm is None:
        return [(names.attention_norm, ("qkv", "gate_up"))]
    return [(names.attention_norm, ("qkv",)), (names.mlp_norm, ("gate_up",))]


def obstacles(config: ModelConfig) -> list[str]:
    """A sentence for each fold that this model does not allow."""
    found = [
        f"the inputs of {' and '.join(name for kind in of_norm for name in kinds(config)[kind])} are not smoothed: "
        f"{config.architecture} has no norm before them that could take the scale"
        for norm, of_norm in norms(config)
        if norm is None
    ]
    if not config.block.gated:
        found.append(
            f"the inputs of {config.names.layer.down} are not smoothed: the mlp of {config.architecture} has no gate, and its "
            f"activation is not linear"
        )
    return found


def fold_norm(
    layer: Layer, norm: str, linears: tuple[str, ...], scale: Tensor, dtype: torch.dtype, offset: float = 0.0
) -> Tensor:
    """Fold scale [hidden], positive, into a norm and the linear layers that read it.

    Returns the scale that was folded: the nearest one for which the norm's weight is exact in `dtype`. `offset`: what is added
    to the stored weight.
    """
    weight = layer[norm + ".weight"] + offset
    stored = (weight / scale - offset).to(dtype).float()
    is_possible = (stored + offset != 0) & stored.isfinite() & (weight != 0)
    stored = torch.where(is_possible, stored, weight - offset)
    exact = torch.where(is_possible, weight / torch.where(is_possible, stored + offset, 1), 1)
    layer[norm + ".weight"] = stored
    if norm + ".bias" in layer:
        layer[norm + ".bias"] = layer[norm + ".bias"] / exact
    for name in linears:
        layer[name + ".weight"] = layer[name + ".weight"] * exact
    return exact


def fold_value(layer: Layer, scale: Tensor, config: ModelConfig) -> None:
    """Multiply the columns of o by scale [heads * head_dim], which is the same for all query heads of a kv head."""
    _multiply_rows(layer, parts(config)["v"], 1 / one_per_kv_head(scale, config)[:, 0].flatten())
    _multiply_columns(layer, config.names.layer.out, scale)


def fold_up(layer: Layer, scale: Tensor, config: ModelConfig) -> None:
    """Multiply the columns of down by scale [intermediate]. The mlp must be gated."""
    assert config.block.gated
    _multiply_rows(layer, parts(config)["up"], 1 / scale)
    _multiply_columns(layer, config.names.layer.down, scale)


def fold_key(layer: Layer, scale: Tensor, config: ModelConfig) -> None:
    """Divide keys by scale [kv_heads, head_dim], and multiply queries by it.

    The scale is the same for the two channels of a pair of RoPE, and for all heads if each of q and k is normalised on its own.
    """
    of_queries = scale.repeat_interleave(config.num_heads // config.num_kv_heads, 0)
    if config.block.qk_norm == "none":
        _multiply_rows(layer, parts(config)["k"], 1 / scale.flatten())
        _multiply_rows(layer, parts(config)["q"], of_queries.flatten())
        return
    is_row, names, offset = config.block.qk_norm == "row", config.names.layer, config.block.norm_offset
    of_k, of_q = (scale.flatten(), of_queries.flatten()) if is_row else (scale[0], scale[0])
    k_norm, q_norm = names.k_norm + ".weight", names.q_norm + ".weight"
    layer[k_norm] = (layer[k_norm] + offset) / of_k - offset
    layer[q_norm] = (layer[q_norm] + offset) * of_q - offset


def one_per_kv_head(of_heads: Tensor, config: ModelConfig) -> Tensor:
    """View of_heads [heads * head_dim] as [kv_heads, query heads per kv head, head_dim]."""
    return of_heads.view(config.num_kv_heads, -1, config.head_dim)


def _multiply_columns(layer: Layer, name: str, factor: Tensor) -> None:
    layer[name + ".weight"] = layer[name + ".weight"] * factor


def _multiply_rows(layer: Layer, part: FoldPart, factor: Tensor) -> None:
    weight = layer[part.name + ".weight"].clone()
    weight[part.rows] *= factor[:, None]
    layer[part.name + ".weight"] = weight
    if part.name + ".bias" in layer:
        bias = layer[part.name + ".bias"].clone()
        bias[part.rows] *= factor
        layer[part.name + ".bias"] = bias
