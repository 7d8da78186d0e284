"""The attention layer: fused qkv projection, q/k norm, rotary embedding and KV write, paged attention, output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.layers.linear import Linear
from backend.layers.lora import Adapt
from kernels.common.kv_format import KVPool
from kernels.int8_rows import Int8Rows
from kernels.kv_append import kv_append
from kernels.paged_attention import Plan, paged_attention


@dataclass(slots=True)
class AttentionWeights:
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden], rows in the order q, k, v
    out: Linear  # [hidden, heads * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]


def attention(
    x: Tensor | Int8Rows,
    weights: AttentionWeights,
    pool: KVPool,
    plan: Plan,
    positions: Tensor,
    cells: Tensor,
    tables: tuple[Tensor, Tensor],
    norm_eps: float,
    adapt: Adapt | None = None,
) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]. Writes this layer's KV of all tokens to `pool` before it is read.

    positions, cells int64 [num_tokens]; a token whose cell is -1 is padding. tables: cos and sin (backend/layers/rotary.py).
    adapt: adds LoRA adapters' parts.
    """
    qkv = weights.qkv(x)
    if adapt is not None:
        assert isinstance(x, Tensor)  # a model that takes adapters does not quantise it
        adapt(qkv, x, "qkv")
    q = kv_append(qkv, positions, *tables, cells, pool, weights.q_norm, weights.k_norm, norm_eps)
    out = paged_attention(q, pool, plan)  # [num_tokens, heads, head_dim]
    attended = out.flatten(1)
    projected = weights.out(attended)
    if adapt is not None:
        adapt(projected, attended, "out")
    return projected
