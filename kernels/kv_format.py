"""int8 and int4 keys and values: how a token's head is quantised, and how the pool of one layer holds them.

For each token and kv head, of its key (after RoPE) and of its value, asymmetric, in float32 (TurboMind's form; QServe, Lin et al.
2024, keeps -least / scale instead, which overflows float16 where a row is nearly constant):

    least = float16(clamp(min, -65504, 65504))
    scale = float16(clamp((max - least) / (2^bits - 1), 0, 65504))
    q     = clamp(floor((x - least) / scale + 0.5), 0, 2^bits - 1)        0 where the scale is 0
    x     ~ q * scale + least

65504 is float16's largest: scale and least are finite whatever the row holds. What lies below -65504 is cut, and what lies more
than 65504 * (2^bits - 1) above least. Otherwise an error is at most scale / 2 + |least| / 2048 + 2^-17, of which the last two
matter in rows that hardly vary.

    pool, uint8 [num_blocks, block_bytes]; a block is
        data        [kv_heads][key, value][block_size][head_dim * bits / 8]
        params      [kv_heads][key, value][block_size][scale, least]          float16

An int4 byte j of a row holds q[j] in its low and q[j + head_dim / 2] in its high bits, so that the two halves of a row are
unpacked without exchanging neighbours. Blocks of 16-bit pools: kernels/kv_write.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# (rows, head_dim, bits)
CASES = [(1, 8, 8), (5, 64, 4), (33, 128, 4), (7, 96, 8)]

MOST_HALF = 65504.0


class QuantizedPool(NamedTuple):
    """The layout of one layer's pool."""

    block_size: int  # tokens
    kv_heads: int
    head_dim: int  # a multiple of 8
    bits: int  # 8 or 4

    @property
    def row_bytes(self) -> int:
        """Of one token's key, or value, of one head."""
        return self.head_dim * self.bits // 8

    @property
    def data_bytes(self) -> int:
        return self.kv_heads * 2 * self.block_size * self.row_bytes

    @property
    def block_bytes(self) -> int:
        return self.data_bytes + self.kv_heads * 2 * self.block_size * 4

    def data(self, pool: Tensor) -> Tensor:
        """pool uint8 [num_blocks, block_bytes] -> a view [num_blocks, kv_heads, 2, block_size, row_bytes] uint8."""
        shape = (self.kv_heads, 2, self.block_size, self.row_bytes)
        return pool[:, : self.data_bytes].unflatten(1, shape)

    def params(self, pool: Tensor) -> Tensor:
        """-> a view [num_blocks, kv_heads, 2, block_size, 2] float16: scale, least."""
        return pool[:, self.data_bytes :].view(torch.float16).unflatten(1, (self.kv_heads, 2, self.block_size, 2))


def quantize_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, head_dim] -> (q uint8 [rows, head_dim], scale float16 [rows], least float16 [rows])."""
    x = x.float()
    most_q = (1 << bits) - 1
    least = x.amin(1).clamp_(-MOST_HALF, MOST_HALF).half()
    shifted = x - least.float()[:, None]
    scale = (shifted.amax(1) / most_q).clamp_(0, MOST_HALF).half()  # below 0: a constant row, and least was rounded up
    divisor = torch.where(scale > 0, scale.float(), torch.inf)[:, None]
    q = torch.floor(shifted / divisor + 0.5).clamp_(0, most_q)
    return q.to(torch.uint8), scale, least


def dequantize_rows(q: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """q uint8 [rows, head_dim], scale, least float16 [rows] -> float32 [rows, head_dim]."""
    return q.float() * scale.float()[:, None] + least.float()[:, None]


def pack(q: Tensor, bits: int) -> Tensor:
    """q uint8 [..., head_dim] -> uint8 [..., head_dim * bits / 8]."""
    if bits == 8:
        return q
    low, high = q.chunk(2, dim=-1)
    return low | high << 4


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    if bits == 8:
        return packed
    return torch.cat((packed & 15, packed >> 4), dim=-1)
