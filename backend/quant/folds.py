"""Scales moved between a layer's tensors without changing what the layer computes.

A layer is its tensors by their names within the layer, float32 (`Layer`). Every function here changes some of them so that the
layer's output is the same but for rounding: the inputs of a linear layer are divided by a scale, its columns multiplied.

    norm -> qkv, gate_up     the norm's weight takes the division (SmoothQuant, Xiao et al., 2023)
    value -> out             v's rows take it: a value channel reaches o's columns of every query head of its kv head
    up -> down               up's rows take it: silu(gate) * up is linear in up
    key -> query             k's rows take the division, q's rows the product (SmoothAttention, QServe, Lin et al., 2024). RoPE
                             mixes channels i and i + head_dim / 2, so that they need one scale. Where q and k are normalised
                             (Qwen3), the weights of these norms take it, which all heads share
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.models.config import ModelConfig

Layer = dict[str, Tensor]
Q, K, V, OUT = (f"self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
INPUT_NORM, POST_NORM = "input_layernorm", "post_attention_layernorm"
Q_NORM, K_NORM = "self_attn.q_norm", "self_attn.k_norm"


def fold_norm(layer: Layer, norm: str, linears: tuple[str, ...], scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale [hidden], positive -> the scale that was folded: the nearest for which the norm's weight is exact in `dtype`."""
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
    """scale [heads * head_dim] of o's columns, the same for all query heads of a kv head."""
    _multiply_rows(layer, V, 1 / one_per_kv_head(scale, config)[:, 0].flatten())
    layer[OUT + ".weight"] = layer[OUT + ".weight"] * scale


def fold_up(layer: Layer, scale: Tensor) -> None:
    """scale [intermediate] of down's columns."""
    _multiply_rows(layer, UP, 1 / scale)
    layer[DOWN + ".weight"] = layer[DOWN + ".weight"] * scale


def fold_key(layer: Layer, scale: Tensor, config: ModelConfig) -> None:
    """scale [kv_heads, head_dim], the same for i and i + head_dim / 2; with norms of q and k the same for all heads."""
    if config.qk_norm:
        layer[K_NORM + ".weight"] = layer[K_NORM + ".weight"] / scale[0]
        layer[Q_NORM + ".weight"] = layer[Q_NORM + ".weight"] * scale[0]
        return
    _multiply_rows(layer, K, 1 / scale.flatten())
    _multiply_rows(layer, Q, scale.repeat_interleave(config.num_heads // config.num_kv_heads, 0).flatten())


def one_per_kv_head(of_heads: Tensor, config: ModelConfig) -> Tensor:
    """[heads * head_dim] -> [kv_heads, query heads of each, head_dim]."""
    return of_heads.view(config.num_kv_heads, -1, config.head_dim)


def _multiply_rows(layer: Layer, name: str, factor: Tensor) -> None:
    layer[name + ".weight"] = layer[name + ".weight"] * factor[:, None]
    if name + ".bias" in layer:
        layer[name + ".bias"] = layer[name + ".bias"] * factor
