"""3. RoPE, the write to the KV pool and its quantisation in one."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Peer, Random, near, within_ties, worst
from benchmarks.gpu.cases.pools import Heads, heads_for, kind_of, make_pool
from benchmarks.gpu.goals import at_most_us, of_floor
from kernels import kv_append
from kernels.common.kv_format import KV_FORMATS, KVPool, QuantizedPool, plain_pool, unpack

TOKENS = {64: 5, 2048: 9, 8192: 13}  # tokens on a GPU: tokens in the interpreter
GOALS = {64: at_most_us(3), 2048: of_floor(0.80), 8192: of_floor(0.80)}
POSITIONS = 8192


class Inputs(NamedTuple):
    qkv: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    cells: Tensor
    pool: KVPool


def _make(random: Random, heads: Heads, kv: str, tokens: int, block_size: int) -> Inputs:
    num_blocks = -(-tokens // block_size) + 1
    angles = random.normal(POSITIONS, heads.dim // 2, dtype=torch.float32)
    return Inputs(
        qkv=random.normal(tokens, (heads.query + 2 * heads.kv) * heads.dim),
        positions=random.integers(0, POSITIONS, tokens, dtype=torch.int64),
        cos=angles.cos(),
        sin=angles.sin(),
        cells=random.order(num_blocks * block_size)[:tokens],
        pool=make_pool(random, heads, kv, num_blocks, block_size),
    )


def _run(x: Inputs) -> Tensor:
    return kv_append.kv_append(*x)


def _eager(x: Inputs) -> Tensor:
    return kv_append.reference(*x)


def _empty_like(pool: KVPool) -> KVPool:
    """With memory of its own, in which nothing is."""
    _, block_size, kv_heads, _ = pool.keys.shape
    if pool.params is None:
        return plain_pool(pool.keys.new_zeros(len(pool.keys), block_size, 2, kv_heads, pool.head_dim))
    layout = QuantizedPool(block_size, kv_heads, pool.head_dim, pool.format)
    return layout.view(pool.keys.new_zeros(len(pool.keys), layout.block_bytes))


def _check(x: Inputs, q: Tensor) -> Check:
    expected = _empty_like(x.pool)
    expected_q = kv_append.reference(*x._replace(pool=expected))
    block_size = x.pool.keys.shape[1]
    at = x.cells // block_size, x.cells % block_size
    checks = [near(q, expected_q)]
    for (data, bits), (expected_data, _) in zip(x.pool.sides, expected.sides, strict=True):
        if x.pool.params is None:
            checks.append(near(data[at], expected_data[at]))
        else:
            checks.append(within_ties(unpack(data[at], bits), unpack(expected_data[at], bits)))
    if x.pool.params is not None and expected.params is not None:
        checks.append(near(x.pool.params[at], expected.params[at]))
    return worst(*checks)


def cases(small: bool) -> list[Case]:
    heads = heads_for(small)
    made = []
    for kv in KV_FORMATS:
        for tokens, few in TOKENS.items():
            count = few if small else tokens
            moved = 2 * heads.dim * (2 * heads.query + 2 * heads.kv) + heads.kv_bytes(kv)
            made.append(
                Case(
                    name=f"kv append {kind_of(kv)} {tokens} tokens",
                    number=3,
                    make=partial(_make, heads=heads, kv=kv, tokens=count, block_size=16 if small else 64),
                    run=_run,
                    check=_check,
                    bytes=count * moved,
                    goals=(GOALS[tokens],),
                    peers=(Peer("eager", _eager),),
                    is_warm=tokens == 64,
                )
            )
    return made
