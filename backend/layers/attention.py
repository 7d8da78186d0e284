"""The attention layer: fused qkv projection, q/k norm, rotary embedding and KV write, paged attention, output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.architectures.description import Block
from backend.layers.linear import Linear
from backend.layers.lora import Adapt
from backend.layers.norm import NormWeights, norm
from backend.layers.rotary import RotaryTables
from kernels.common.kv_format import KVPool
from kernels.common.scoring import Scoring
from kernels.int8_rows import Int8Rows
from kernels.kv_append import kv_append
from kernels.paged_attention import Plan, paged_attention


@dataclass(slots=True)
class AttentionWeights:
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden], rows in the order q, k, v;
    # with Block.gates_attention as many as those of q follow: the gates
    out: Linear  # [hidden, heads * head_dim]
    q_norm: Tensor | None  # [head_dim]; [heads * head_dim] where Block.qk_norm is row
    k_norm: Tensor | None  # [head_dim]; [kv_heads * head_dim]
    sinks: Tensor | None = None  # float32 [heads]
    key_shift: Tensor | None = None  # float32 [kv_heads, head_dim]: kernels/common/kv_rotation.py


def attention(
    x: Tensor | Int8Rows,
    weights: AttentionWeights,
    block: Block,
    pool: KVPool,
    plan: Plan,
    positions: Tensor,
    cells: Tensor,
    tables: RotaryTables | None,
    query_scales: Tensor | None = None,
    adapt: Adapt | None = None,
) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]. Writes this layer's KV of all tokens to `pool` before it is read.

    positions, cells int64 [num_tokens]; a token whose cell is -1 is padding. tables: cos and sin (backend/layers/rotary.py), or
    None: the layer does not rotate. query_scales: a factor of the queries of each position. adapt: adds LoRA adapters' parts.
    """
    qkv = weights.qkv(x)
    if adapt is not None:
        assert isinstance(x, Tensor)  # a model that takes adapters does not quantise it
        adapt(qkv, x, "qkv")
    gate: Tensor | None = None
    if block.gates_attention:
        width = weights.out.shape[1]
        qkv, gate = qkv[:, :-width].contiguous(), qkv[:, -width:]
    norms = weights.q_norm, weights.k_norm
    if weights.q_norm is not None and not (block.qk_norm == "head" and block.norm == "rms"):
        qkv, norms = _with_norms(qkv, weights, block, pool), (None, None)
    cos, sin = tables or (None, None)
    interleaved = block.rope_interleaved
    q = kv_append(
        *(qkv, positions, cos, sin, cells, pool, *norms, block.norm_eps, interleaved, query_scales),
        key_shift=weights.key_shift,
    )
    scoring = Scoring(block.attention_scale, block.attention_softcap, weights.sinks)
    out = paged_attention(q, pool, plan, scoring)  # [num_tokens, heads, head_dim]
    attended = out.flatten(1)
    if gate is not None:
        attended = attended * gate.sigmoid()
    projected = weights.out(attended)
    if adapt is not None:
        adapt(projected, attended, "out")
    return projected


def _with_norms(qkv: Tensor, weights: AttentionWeights, block: Block, pool: KVPool) -> Tensor:
    """qkv [num_tokens, (heads + 2 * kv_heads) * head_dim] with normed q and k, for norms that `kv_append` does not compute."""
    kv = pool.keys.shape[2] * pool.head_dim

    def normed(part: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return norm(part.unflatten(1, (-1, len(weight))), NormWeights(weight), block).flatten(1)

    q, k, v = qkv.split((qkv.shape[1] - 2 * kv, kv, kv), dim=1)
    return torch.cat((normed(q, weights.q_norm), normed(k, weights.k_norm), v), dim=1)
