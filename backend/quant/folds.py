"""Moves scales between the tensors of a decoder layer without changing what the layer computes.

A `Layer` maps names within the layer to float32 tensors. Every function here divides the inputs of a linear layer by a scale and
multiplies its columns by the same scale, so that the output of the decoder layer stays the same but for rounding. The division
is folded into the tensors that make those inputs:

    norm -> qkv, gate_up     the norm's weight is divided (SmoothQuant, Xiao et al., 2023)
    value -> out             the rows of v are divided; a value channel reaches the columns of o for every query head of its kv
                             head, so that those share a scale
    up -> down               the rows of up are divided, because silu(gate) * up is linear in up
    key -> query             the rows of k are divided, those of q multiplied (SmoothAttention, QServe, Lin et al., 2024). RoPE
                             mixes channels i and i + head_dim / 2, so that they share a scale. Where q and k are normalised
                             (Qwen3), the weights of these norms are changed instead; all heads share them
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.architectures.description import ModelConfig

Layer = dict[str, Tensor]
Q, K, V, OUT = (f"self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
INPUT_NORM, POST_NORM = "input_layernorm", "post_attention_layernorm"
Q_NORM, K_NORM = "self_attn.q_norm", "self_attn.k_norm"


def fold_norm(layer: Layer, norm: str, linears: tuple[str, ...], scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Fold scale [hidden], positive, into a norm and the linear layers that read it.

    Returns the scale that was folded: the nearest one for which the norm's weight is exact in `dtype`.
    """
    weight = layer[norm + ".weight"]
    stored = (weight / scale).to(dtype).float()
    is_possible = (stored != 0) & stored.isfinite() & (weight != 0)
    stored = torch.where(is_possible, stored, weight)
    exact = torch.where(is_possible, weight / torch.where(is_possible, stored, 1), 1)
    layer[norm + ".weight"] = stored
    for name in linears:
        layer[name + ".weight"] = layer[name + ".weight"] * exact
    return exact


def fold_value(layer: Layer, scale: Tensor, config: ModelConfig) -> None:
    """Multiply the columns of o by scale [heads * head_dim], which is the same for all query heads of a kv head."""
    _multiply_rows(layer, V, 1 / one_per_kv_head(scale, config)[:, 0].flatten())
    layer[OUT + ".weight"] = layer[OUT + ".weight"] * scale


def fold_up(layer: Layer, scale: Tensor) -> None:
    """Multiply the columns of down by scale [intermediate]."""
    _multiply_rows(layer, UP, 1 / scale)
    layer[DOWN + ".weight"] = layer[DOWN + ".weight"] * scale


def fold_key(layer: Layer, scale: Tensor, config: ModelConfig) -> None:
    """Divide keys by scale [kv_heads, head_dim], and multiply queries by it.

    The scale is the same for channels i and i + head_dim / 2, and for all heads if q and k are normalised.
    """
    if config.block.qk_norm != "none":
        layer[K_NORM + ".weight"] = layer[K_NORM + ".weight"] / scale[0]
        layer[Q_NORM + ".weight"] = layer[Q_NORM + ".weight"] * scale[0]
        return
    _multiply_rows(layer, K, 1 / scale.flatten())
    _multiply_rows(layer, Q, scale.repeat_interleave(config.num_heads // config.num_kv_heads, 0).flatten())


def one_per_kv_head(of_heads: Tensor, config: ModelConfig) -> Tensor:
    """View of_heads [heads * head_dim] as [kv_heads, query heads per kv head, head_dim]."""
    return of_heads.view(config.num_kv_heads, -1, config.head_dim)


def _multiply_rows(layer: Layer, name: str, factor: Tensor) -> None:
    layer[name + ".weight"] = layer[name + ".weight"] * factor[:, None]
    if name + ".bias" in layer:
        layer[name + ".bias"] = layer[name + ".bias"] * factor
