"""2. Attention of context rows over paged KV, fewer queries than keys included."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Peer, near
from benchmarks.gpu.cases.compiled import causal_block_mask, flex_attention
from benchmarks.gpu.cases.pools import Dense, Paged, heads_for, make_dense, make_paged
from benchmarks.gpu.goals import of_floor, than_row
from kernels import context_attention

DENSE, PAGED = "context attention bf16 8k causal, blocks in order", "context attention bf16 8k causal, paged"
CHECKED = 64  # queries


def _run(x: Paged) -> Tensor:
    return context_attention.context_attention(x.q, x.pool, x.starts, x.lengths, x.tables, x.scale)


def _check(x: Paged, out: Tensor) -> Check:
    """Some queries, each as a row of its own; the last one among them."""
    tokens, length = len(x.q), int(x.lengths[0])
    chosen = torch.linspace(0, tokens - 1, min(CHECKED, tokens), device=x.q.device).long()
    expected = context_attention.reference(
        x.q[chosen],
        x.pool,
        torch.arange(len(chosen) + 1, device=x.q.device),
        length - tokens + chosen + 1,
        x.tables.expand(len(chosen), -1),
        x.scale,
    )
    return near(out[chosen], expected)


def _sdpa(x: Dense) -> Tensor:
    if x.q.shape[2] == x.k.shape[2]:
        return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(x.q.shape[2], x.k.shape[2])
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=mask, enable_gqa=True)


def _flex(x: Dense) -> Tensor:
    mask = causal_block_mask(x.q.shape[2], x.k.shape[2], x.q.device)
    return flex_attention()(x.q, x.k, x.v, block_mask=mask, enable_gqa=True)


PEERS = (Peer("SDPA causal", _sdpa, make_dense), Peer("flex_attention", _flex, make_dense, compiles=True))
# name -> format of KV, (queries, keys, block size), in the interpreter, blocks in order, goals, importance
ROWS = {
    DENSE: ("auto", (8192, 8192, 128), (70, 70, 16), True, (of_floor(0.50, 0.60),), 1),
    PAGED: ("auto", (8192, 8192, 64), (70, 70, 16), False, (of_floor(0.50, 0.60), than_row(DENSE, 0.9)), 1),
    "context attention bf16 q 512 over 8k": ("auto", (512, 8704, 64), (20, 85, 16), False, (of_floor(0.45),), 1),
    "context attention int8 q 512 over 8k": ("int8", (512, 8704, 64), (20, 85, 16), False, (), 3),
    "context attention int4 q 512 over 8k": ("int4", (512, 8704, 64), (20, 85, 16), False, (), 3),
}


def cases(small: bool) -> list[Case]:
    heads = heads_for(small)
    made = []
    for name, (kv, *sizes, in_order, goals, importance) in ROWS.items():
        queries, keys, block_size = sizes[small]
        seen = queries * (keys - queries) + queries * (queries + 1) // 2
        made.append(
            Case(
                name=name,
                number=2,
                make=partial(
                    make_paged, heads=heads, kv=kv, queries=queries, length=keys, rows=1, block_size=block_size,
                    in_order=in_order,
                ),
                run=_run,
                check=_check,
                bytes=keys * heads.kv_bytes(kv) + 4 * queries * heads.query * heads.dim,
                flops=4 * seen * heads.query * heads.dim,
                goals=goals,
                peers=PEERS,
                importance=importance,
            )
        )  # fmt: skip
    return made
