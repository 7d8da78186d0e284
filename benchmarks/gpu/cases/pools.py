"""Paged KV of random content."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.case import Random
from kernels.common.kv_format import KV_FORMATS, KVPool, QuantizedPool, plain_pool


class Heads(NamedTuple):
    query: int
    kv: int
    dim: int

    def kv_bytes(self, kv: str) -> int:
        """Bytes of one token's keys and values in one layer, scales included."""
        format = KV_FORMATS[kv]
        return self.kv * (self.dim * sum(format) // 8 + (2 * 4 if format.is_quantised else 0))


LLAMA = Heads(32, 8, 128)
SMALL = Heads(4, 2, 32)


class Paged(NamedTuple):
    q: Tensor  # [tokens, heads, head_dim]
    pool: KVPool
    starts: Tensor  # int32 [rows + 1]
    lengths: Tensor  # int32 [rows]
    tables: Tensor  # int32 [rows, max_blocks]
    scale: float


def heads_for(small: bool) -> Heads:
    return SMALL if small else LLAMA


def kind_of(kv: str) -> str:
    """The name of a format of KV in a case's name."""
    return "bf16" if kv == "auto" else kv


def make_pool(random: Random, heads: Heads, kv: str, num_blocks: int, block_size: int) -> KVPool:
    if kv == "auto":
        return plain_pool(random.normal(num_blocks, block_size, 2, heads.kv, heads.dim))
    layout = QuantizedPool(block_size, heads.kv, heads.dim, KV_FORMATS[kv])
    pool = layout.view(random.integers(0, 256, num_blocks, layout.block_bytes, dtype=torch.uint8))
    spread = 3 + random.normal(*pool.params.shape[:-1], dtype=torch.float32).clamp(-1, 1)
    steps = torch.tensor([2.0**bits - 1 for bits in layout.format], device=random.device)
    pool.params[..., 0] = (spread / steps[:, None]).half()  # values from -spread / 2 to spread / 2
    pool.params[..., 1] = (-spread / 2).half()
    return pool


def make_paged(
    random: Random,
    heads: Heads,
    kv: str,
    queries: int,
    length: int,
    rows: int,
    block_size: int,
    in_order: bool = False,
) -> Paged:
    """`rows` sequences of `length` tokens, of which the last `queries` are run."""
    width = -(-length // block_size)
    pool = make_pool(random, heads, kv, rows * width, block_size)
    order = torch.arange(rows * width, device=random.device) if in_order else random.order(rows * width)
    return Paged(
        q=random.normal(rows * queries, heads.query, heads.dim),
        pool=pool,
        starts=torch.arange(rows + 1, device=random.device, dtype=torch.int32) * queries,
        lengths=torch.full((rows,), length, device=random.device, dtype=torch.int32),
        tables=order.view(rows, width).int(),
        scale=heads.dim**-0.5,
    )


class Dense(NamedTuple):
    """The keys and values as the peers read them: without pages."""

    q: Tensor  # [rows, heads, queries, head_dim]
    packed_q: Tensor  # [rows, kv_heads, group * queries, head_dim]
    k: Tensor  # [rows, kv_heads, length, head_dim] bfloat16, contiguous
    v: Tensor


def make_dense(paged: Paged) -> Dense:
    """bfloat16 keys and values of the same shape; of a plain pool, the same."""
    rows, length = len(paged.lengths), int(paged.lengths[0])
    kv_heads = paged.pool.keys.shape[2]
    shape = (rows, kv_heads, length, paged.pool.head_dim)
    if paged.pool.params is None:
        sides = (side[paged.tables.long()].flatten(1, 2)[:, :length] for side, _ in paged.pool.sides)
        k, v = (side.transpose(1, 2).contiguous() for side in sides)
    else:
        k, v = (torch.randn(shape, device=paged.q.device).to(paged.q.dtype) for _ in range(2))
    q = paged.q.unflatten(0, (rows, -1)).transpose(1, 2).contiguous()
    return Dense(q, q.unflatten(1, (kv_heads, -1)).flatten(2, 3), k, v)
