"""Latent attention in its absorbed form (backend/architectures/latent.py), on the same paged attention as other layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.architectures.description import Block
from backend.architectures.latent import Latent
from backend.layers.linear import Linear
from backend.layers.rotary import RotaryTables
from kernels.common.kv_format import KVPool
from kernels.common.scoring import Scoring
from kernels.int8_rows import Int8Rows
from kernels.kv_append import kv_append
from kernels.norm import norm
from kernels.paged_attention import Plan, paged_attention


@dataclass(slots=True)
class LatentWeights:
    settings: Latent
    inputs: Linear  # [queries or query_rank, and rank + rotated, hidden]
    norm: Tensor  # [rank]
    keys: Linear  # [heads * rank, plain], of each head its rows
    values: Linear  # [heads * value_dim, rank]
    out: Linear  # [hidden, heads * value_dim]
    queries: Linear | None = None  # [heads * (plain + rotated), query_rank]
    query_norm: Tensor | None = None  # [query_rank]

    @property
    def linears(self) -> list[Linear]:
        own = [self.inputs, self.keys, self.values, self.out]
        return own if self.queries is None else [*own, self.queries]


def latent_attention(
    x: Tensor | Int8Rows,
    weights: LatentWeights,
    block: Block,
    pool: KVPool,
    plan: Plan,
    positions: Tensor,
    cells: Tensor,
    tables: RotaryTables,
) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]. Writes this layer's latents of all tokens to `pool` before it is read.

    positions, cells and tables are those of backend/layers/attention.py.
    """
    of = weights.settings
    inputs = weights.inputs(x)
    width = inputs.shape[1] - of.rank - of.rotated
    query, latent, rotated = inputs.split((width, of.rank, of.rotated), dim=1)
    if weights.queries is not None and weights.query_norm is not None:
        query = weights.queries(norm(query, weights.query_norm, of.norm_eps))
    plain, turned = query.unflatten(1, (-1, of.query_dim)).split((of.plain, of.rotated), dim=2)
    queries = torch.cat((turned, weights.keys(plain)), dim=2)
    latent = norm(latent, weights.norm, of.norm_eps)
    key, value = torch.cat((rotated, latent), dim=1), torch.cat((latent, torch.zeros_like(rotated)), dim=1)
    qkv = torch.cat((queries.flatten(1), key, value), dim=1)
    no_norms = None, None
    appended = kv_append(
        *(qkv, positions, *tables, cells, pool, *no_norms, block.norm_eps, block.rope_interleaved, None)
    )
    attended = paged_attention(appended, pool, plan, Scoring(block.attention_scale))  # [num_tokens, heads, head_dim]
    return weights.out(weights.values(attended[..., : of.rank]).flatten(1))
