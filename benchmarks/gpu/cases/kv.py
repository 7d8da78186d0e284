"""3. RoPE, the write to the KV pool and its quantisation in one."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Peer, Random, near, within_ties, worst
from benchmarks.gpu.cases.pools import Heads, heads_for, make_pool
from benchmarks.gpu.goals import at_most_us, of_floor
from kernels import kv_append
from kernels.common.kv_format import KVPool, unpack

TOKENS = {64: 5, 2048: 9, 8192: 13}  # tokens on a GPU: tokens in the interpreter
GOALS = {64: at_most_us(3), 2048: of_floor(0.80), 8192: of_floor(0.80)}
POSITIONS = 8192
KINDS = {16: "bf16", 8: "int8", 4: "int4"}


class Inputs(NamedTuple):
    qkv: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    cells: Tensor
    pool: KVPool


def _make(random: Random, heads: Heads, bits: int, tokens: int, block_size: int) -> Inputs:
    num_blocks = -(-tokens // block_size) + 1
    angles = random.normal(POSITIONS, heads.dim // 2, dtype=torch.float32)
    return Inputs(
        qkv=random.normal(tokens, (heads.query + 2 * heads.kv) * heads.dim),
        positions=random.integers(0, POSITIONS, tokens, dtype=torch.int64),
        cos=angles.cos(),
        sin=angles.sin(),
        cells=random.order(num_blocks * block_size)[:tokens],
        pool=make_pool(random, heads, bits, num_blocks, block_size),
    )


def _run(x: Inputs) -> Tensor:
    return kv_append.kv_append(*x)


def _eager(x: Inputs) -> Tensor:
    return kv_append.reference(*x)


def _cloned(pool: KVPool) -> KVPool:
    return pool._replace(
        data=pool.data.clone(), params=None if pool.params is None else pool.params.contiguous().clone()
    )


def _check(x: Inputs, q: Tensor) -> Check:
    expected = _cloned(x.pool)
    expected.data.zero_()
    expected_q = kv_append.reference(*x._replace(pool=expected))
    block_size = x.pool.data.shape[1]
    block, offset = x.cells // block_size, x.cells % block_size
    data, expected_data = x.pool.data[block, offset], expected.data[block, offset]
    if x.pool.params is None:
        return worst(near(q, expected_q), near(data, expected_data))
    bits = x.pool.bits
    params = near(x.pool.params[block, offset], expected.params[block, offset])
    return worst(near(q, expected_q), params, within_ties(unpack(data, bits), unpack(expected_data, bits)))


def cases(small: bool) -> list[Case]:
    heads = heads_for(small)
    made = []
    for bits, kind in KINDS.items():
        for tokens, few in TOKENS.items():
            count = few if small else tokens
            moved = 2 * heads.dim * (2 * heads.query + 2 * heads.kv) + heads.kv_bytes(bits)
            made.append(
                Case(
                    name=f"kv append {kind} {tokens} tokens",
                    number=3,
                    make=partial(_make, heads=heads, bits=bits, tokens=count, block_size=16 if small else 64),
                    run=_run,
                    check=_check,
                    bytes=count * moved,
                    goals=(GOALS[tokens],),
                    peers=(Peer("eager", _eager),),
                    is_warm=tokens == 64,
                )
            )
    return made
