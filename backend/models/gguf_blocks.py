"""GGUF's quantised blocks of 32 or 256 consecutive values of a row, and their values in float32.

    Q4_0   d, 16 bytes of 4 bits       w = d (q - 8)         Q4_1   d, m, the same                  w = d q + m
    Q5_0   d, 32 fifth bits, the same  w = d (q - 16)        Q5_1   d, m, 32 fifth bits, the same   w = d q + m
    Q8_0   d, 32 int8                  w = d q
    Q4_K   d, dmin, 8 scales s and minima m of 6 bits in 12 bytes, 4 bits      w = d s q - dmin m, s and m for each 32
    Q5_K   d, dmin, the same, 256 fifth bits, 4 bits                           the same
    Q6_K   low 4 bits, high 2 bits, 16 scales s of int8, d                     w = d s (q - 32), s for each 16

d, m and dmin are float16; a byte of 4 bits holds value j in its low and value j + 16 (of a _K block: j + 32) in its high bits.
Source: ggml-quants.c; the order of the operations is that of llama.cpp's own gguf.quants, so that the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from backend.api.checkpoint.gguf import TYPES
from backend.layers.linear import QuantizedWeight
from kernels.common.super_blocks import SuperBlocks
from kernels.common.super_blocks import floats as floats_of_super_blocks
from kernels.w4a16 import Weight4

BLOCK_BYTES = {kind.name: kind.num_bytes for kind in TYPES.values()}
BLOCK_SIZE = {kind.name: kind.size for kind in TYPES.values()}
GROUP = 32  # columns that share a scale in the types with a form in `held`


def floats(blocks: Tensor, kind: str) -> Tensor:
    """uint8 [rows, bytes] of a type -> float32 [rows, columns]."""
    if kind in _SUPER_BLOCKS:
        return floats_of_super_blocks(super_blocks(blocks, kind))
    return _DECODERS[kind](blocks.view(-1, BLOCK_BYTES[kind])).view(blocks.shape[0], -1)


def num_bytes(kind: str, columns: int) -> int:
    """Bytes of a row."""
    return columns // BLOCK_SIZE[kind] * BLOCK_BYTES[kind]


def int8(blocks: Tensor, kind: str) -> QuantizedWeight:
    """uint8 [rows, bytes] of Q4_0, Q5_0 or Q8_0 as int8 with a scale for each 32 columns, without loss."""
    blocks = blocks.view(blocks.shape[0], -1, BLOCK_BYTES[kind])
    rows, q = blocks.shape[0], blocks[..., 2:]
    if kind == "Q8_0":
        values = q.contiguous().view(torch.int8)
    elif kind == "Q5_0":
        values = _five_bits(q.flatten(0, 1)).view(torch.int8) - 16
    else:
        values = _halves(q).view(torch.int8) - 8
    scales = blocks[..., :2].contiguous().view(torch.float16).float()
    return QuantizedWeight(values.reshape(rows, -1), scales.view(rows, -1), GROUP, "int8")


def four_bits(blocks: Tensor) -> Weight4:
    """uint8 [rows, bytes] of Q4_0 as 4-bit weights, without loss: both have the same order within a group."""
    blocks = blocks.view(blocks.shape[0], -1, BLOCK_BYTES["Q4_0"])
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(2)
    return Weight4(blocks[..., 2:].flatten(1).contiguous(), scales.T.contiguous(), None, GROUP)


def super_blocks(blocks: Tensor, kind: str) -> SuperBlocks:
    """uint8 [rows, bytes] of Q4_K, Q5_K or Q6_K with their numbers side by side, without loss."""
    made = _SUPER_BLOCKS[kind](blocks.view(-1, BLOCK_BYTES[kind]))
    shape = (blocks.shape[0], -1)
    minima = None if made.minima is None else made.minima.reshape(shape)
    minimum = None if made.minimum is None else made.minimum.view(shape)
    return SuperBlocks(
        made.kind, made.q.reshape(shape), made.scales.reshape(shape), minima, made.scale.view(shape), minimum
    )


def scales(blocks: Tensor, kind: str) -> Tensor:
    """The float16 scales stored in each block. blocks: uint8 [rows, bytes]. Returns [rows, blocks, 1 or 2]."""
    blocks = blocks.view(blocks.shape[0], -1, BLOCK_BYTES[kind])
    part = blocks[..., -2:] if kind == "Q6_K" else blocks[..., : 4 if kind in _TWO else 2]
    return part.contiguous().view(torch.float16)


_TWO = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")  # two float16 at the head of a block


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _halves(q: Tensor) -> Tensor:
    """Bytes [..., n] -> the low bits of all, then the high bits of all, uint8 [..., 2 n]."""
    return torch.cat([q & 15, q >> 4], -1)


def _five_bits(content: Tensor) -> Tensor:
    """[blocks, 4 bytes of fifth bits + 16 bytes] -> uint8 [blocks, 32], 0..31."""
    bits = torch.arange(8, dtype=torch.uint8)
    high = (content[:, :4, None] >> bits & 1).flatten(1)  # bit i of the 32 belongs to value i
    return _halves(content[:, 4:]) | high << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_halves(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _halves(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_five_bits(blocks[:, 2:]).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _five_bits(blocks[:, 4:]).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes of 8 scales and 8 minima, 6 bits each -> (scales, minima), uint8 [blocks, 8].

    The first four of each are the low 6 bits of bytes 0-3 and 4-7; of the last four, bytes 8-11 hold the low 4 bits, and the
    high 2 bits of bytes 0-7 the rest.
    """
    low, middle, last = packed.unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([low & 63, (last & 15) | (low >> 2 & 48)], 1)
    minima = torch.cat([middle & 63, (last >> 4) | (middle >> 2 & 48)], 1)
    return scales, minima


def _float16(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _with_minima(kind: Literal["Q4_K", "Q5_K"], blocks: Tensor, q: Tensor) -> SuperBlocks:
    """q uint8 [blocks, 8, 32]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    return SuperBlocks(kind, q.flatten(1), scales.view(torch.int8), minima, _float16(blocks, 0), _float16(blocks, 2))


def _q4_k(blocks: Tensor) -> SuperBlocks:
    return _with_minima("Q4_K", blocks, _halves(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> SuperBlocks:
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    high = blocks[:, 16:48][:, None, :] >> bits & 1  # [blocks, 8, 32]: bit i belongs to the i-th 32 values
    low = _halves(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    return _with_minima("Q5_K", blocks, low | high << 4)


def _q6_k(blocks: Tensor) -> SuperBlocks:
    low = blocks[:, :128].unflatten(1, (2, 1, 64)) >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 15
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    q = low.reshape(-1, 256) | high.reshape(-1, 256) << 4
    return SuperBlocks("Q6_K", q, blocks[:, 192:208].contiguous().view(torch.int8), None, _float16(blocks, 208), None)


_SUPER_BLOCKS: dict[str, Callable[[Tensor], SuperBlocks]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {  # uint8 [blocks, bytes] -> float32 [blocks, ...]
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
