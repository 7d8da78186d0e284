"""The attention layer: fused qkv projection, q/k norm, rotary embedding, KV write, paged attention, output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.layers.linear import Linear
from kernels.kv_write import kv_write
from kernels.paged_attention import AttentionPlan, paged_attention
from kernels.rms_norm import rms_norm
from kernels.rope import rope


@dataclass(slots=True)
class AttentionWeights:
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden], rows in the order q, k, v
    out: Linear  # [hidden, heads * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]


def attention(
    x: Tensor,
    weights: AttentionWeights,
    pool: Tensor,
    plan: AttentionPlan,
    cells: Tensor,
    angles: tuple[Tensor, Tensor],
    head_dim: int,
    norm_eps: float,
) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]. Writes this layer's KV of all tokens to `pool` before it is read.

    `angles`: kernels.rope.rope_factors of the tokens' positions. `cells` [num_tokens] int64: see kernels/kv_write.py.
    """
    num_tokens, kv_heads = x.shape[0], pool.shape[3]
    qkv = weights.qkv(x).view(num_tokens, -1, head_dim)
    num_heads = qkv.shape[1] - 2 * kv_heads
    qk, v = qkv.split((num_heads + kv_heads, kv_heads), dim=1)  # each [num_tokens, its heads, head_dim]
    if weights.q_norm is not None:
        q, k = qk.split((num_heads, kv_heads), dim=1)
        qk = torch.cat((rms_norm(q, weights.q_norm, norm_eps), rms_norm(k, weights.k_norm, norm_eps)), dim=1)
    q, k = rope(qk, *angles).split((num_heads, kv_heads), dim=1)
    kv_write(pool, k, v, cells)
    out = paged_attention(q, pool, plan)  # [num_tokens, heads, head_dim]
    return weights.out(out.flatten(1))
