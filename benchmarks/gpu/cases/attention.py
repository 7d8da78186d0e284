"""1. Decode attention over paged KV."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Peer, near
from benchmarks.gpu.cases.compiled import flex_attention
from benchmarks.gpu.cases.pools import Dense, Paged, heads_for, kind_of, make_dense, make_paged
from benchmarks.gpu.goals import of_floor
from kernels import decode_attention
from kernels.common.kv_format import KV_FORMATS

# name -> (rows, length), the same in the interpreter
SHAPES = {
    "B64 ctx 4k": ((64, 4096), (3, 70)),
    "B1 ctx 32k": ((1, 32768), (1, 600)),
    "B256 ctx 1k": ((256, 1024), (5, 33)),
}
GOALS = {"auto": of_floor(0.85, 0.92), "int8": of_floor(0.75, 0.85), "int4": of_floor(0.60, 0.75)}
GOALS_OF_ONE_ROW = {"auto": of_floor(0.70)}


def _run(x: Paged) -> Tensor:
    split = decode_attention.split_for(len(x.q), x.pool.keys.shape[2])
    return decode_attention.decode_attention(x.q, x.pool, x.lengths, x.tables, x.scale, split_tokens=split)


def _check(x: Paged, out: Tensor) -> Check:
    return near(out, decode_attention.reference(x.q, x.pool, x.lengths, x.tables, x.scale))


def _packed(x: Dense) -> Tensor:
    return F.scaled_dot_product_attention(x.packed_q, x.k, x.v)


def _grouped(x: Dense) -> Tensor:
    return F.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=True)


def _flex(x: Dense) -> Tensor:
    return flex_attention()(x.q, x.k, x.v, enable_gqa=True)


PEERS = (
    Peer("SDPA, heads as rows", _packed, make_dense),
    Peer("SDPA enable_gqa", _grouped, make_dense),
    Peer("flex_attention", _flex, make_dense, compiles=True),
)


def cases(small: bool) -> list[Case]:
    heads = heads_for(small)
    made = []
    for shape, sizes in SHAPES.items():
        rows, length = sizes[small]
        for kv in KV_FORMATS:
            goal = (GOALS_OF_ONE_ROW if shape.startswith("B1 ") else GOALS).get(kv)
            made.append(
                Case(
                    name=f"decode attention {kind_of(kv)} {shape}",
                    number=1,
                    make=partial(
                        make_paged, heads=heads, kv=kv, queries=1, length=length, rows=rows,
                        block_size=16 if small else 64,
                    ),
                    run=_run,
                    check=_check,
                    bytes=rows * (length * heads.kv_bytes(kv) + 4 * heads.query * heads.dim),
                    flops=4 * rows * length * heads.query * heads.dim,
                    goals=(goal,) if goal else (),
                    peers=PEERS if kv == "auto" else PEERS[:1],
                    importance=1,
                )
            )  # fmt: skip
    return made
