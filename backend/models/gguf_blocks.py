"""GGUF's quantised blocks of 32 or 256 consecutive values of a row -> SuperBlocks, without loss, and their values in float32.

    Q4_0   d, 16 bytes of 4 bits       w = d (q - 8)         Q4_1   d, m, the same                  w = d q + m
    Q5_0   d, 32 fifth bits, the same  w = d (q - 16)        Q5_1   d, m, 32 fifth bits, the same   w = d q + m
    Q8_0   d, 32 int8                  w = d q               IQ4_NL d, 16 bytes of 4 bits           w = d values[q]
    MXFP4  an exponent, 16 bytes of 4 bits                   w = 2^(exponent - 128) values[q]
    Q2_K   16 scales s and minima m of 4 bits, 2 bits, d, dmin                 w = d s q - dmin m, s and m for each 16
    Q3_K   256 third bits, 2 bits, 16 scales s of 6 bits, d                    w = d (s - 32) (q - 4), s for each 16
    Q4_K   d, dmin, 8 scales s and minima m of 6 bits in 12 bytes, 4 bits      w = d s q - dmin m, s and m for each 32
    Q5_K   d, dmin, the same, 256 fifth bits, 4 bits                           the same
    Q6_K   low 4 bits, high 2 bits, 16 scales s of int8, d                     w = d s (q - 32), s for each 16
    IQ4_XS d, 8 scales s of 6 bits, 4 bits                                     w = d (s - 32) values[q], s for each 32
    TQ1_0  five trits in a byte, d     w = d (q - 1)         TQ2_0  2 bits, d                       w = d (q - 1)
    IQ2_*, IQ3_*: gguf_codebooks.py

d, m and dmin are float16; a byte of 4 bits holds value j in its low and value j + 16 (of a _K block: j + 32) in its high bits.
Source: ggml-quants.c; kernels/common/super_blocks.py multiplies in the order of llama.cpp's own gguf.quants, so that values are
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backend.api.checkpoint.gguf import TYPES
from backend.layers.linear import QuantizedWeight
from backend.models import gguf_codebooks
from kernels.common import super_blocks
from kernels.common.super_blocks import FP4, NL, Kind, SuperBlocks
from kernels.w4a16 import Weight4

BLOCK_BYTES = {kind.name: kind.num_bytes for kind in TYPES.values()}
BLOCK_SIZE = {kind.name: kind.size for kind in TYPES.values()}
GROUP = 32  # columns that share a scale in the types with a form in eight bits
_NO_NUMBER = 255  # an exponent of MXFP4


def floats(blocks: Tensor, kind: str) -> Tensor:
    """uint8 [rows, bytes] of a type -> float32 [rows, columns]."""
    return super_blocks.floats(as_super_blocks(blocks, kind))


def as_super_blocks(blocks: Tensor, kind: str) -> SuperBlocks:
    """uint8 [rows, bytes] of a type with its numbers side by side."""
    rows = blocks.shape[0]
    made = _READERS[kind](blocks.view(-1, BLOCK_BYTES[kind]))
    return made.of_tables(*(None if table is None else table.reshape(rows, -1) for table in made.tables))


def num_bytes(kind: str, columns: int) -> int:
    """Bytes of a row."""
    return columns // BLOCK_SIZE[kind] * BLOCK_BYTES[kind]


def int8(blocks: Tensor, kind: str) -> QuantizedWeight:
    """uint8 [rows, bytes] of Q4_0, Q5_0 or Q8_0 as int8 with a scale for each 32 columns, without loss."""
    weight = as_super_blocks(blocks, kind)
    return QuantizedWeight((weight.q - weight.form.centre).view(torch.int8), weight.scale.float(), GROUP, "int8")


def four_bits(blocks: Tensor) -> Weight4:
    """uint8 [rows, bytes] of Q4_0 as 4-bit weights, without loss: both have the same order within a group."""
    blocks = blocks.view(blocks.shape[0], -1, BLOCK_BYTES["Q4_0"])
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(2)
    return Weight4(blocks[..., 2:].flatten(1).contiguous(), scales.T.contiguous(), None, GROUP)


def are_finite(blocks: Tensor, kind: str) -> bool:
    """True if all scales of blocks uint8 [rows, bytes] are finite numbers."""
    blocks = blocks.view(-1, BLOCK_BYTES[kind])
    if kind == "MXFP4":
        return not (blocks[:, 0] == _NO_NUMBER).any()
    start, count = _HALVES[kind]
    return bool(blocks[:, start : start + 2 * count].contiguous().view(torch.float16).isfinite().all())


# The first byte and the number of the float16 that scale a block.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", *gguf_codebooks.READERS), (0, 1)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 2), "Q3_K": (108, 1), "Q6_K": (208, 1), "TQ1_0": (52, 1), "TQ2_0": (64, 1)},
}


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _halves(q: Tensor) -> Tensor:
    """Bytes [..., n] -> the low bits of all, then the high bits of all, uint8 [..., 2 n]."""
    return torch.cat([q & 15, q >> 4], -1)


def _five_bits(content: Tensor) -> Tensor:
    """[blocks, 4 bytes of fifth bits + 16 bytes] -> uint8 [blocks, 32], 0..31."""
    bits = torch.arange(8, dtype=torch.uint8)
    high = (content[:, :4, None] >> bits & 1).flatten(1)  # bit i of the 32 belongs to value i
    return _halves(content[:, 4:]) | high << 4


def _flat(kind: Kind, read: Callable[[Tensor], Tensor], has_minimum: bool = False) -> Callable[[Tensor], SuperBlocks]:
    """`read`: what follows the float16 -> q. The minimum is stored as what is added."""

    def of(blocks: Tensor) -> SuperBlocks:
        minimum = -_half(blocks, 2) if has_minimum else None
        return SuperBlocks(kind, read(blocks[:, 4 if has_minimum else 2 :]), None, None, _half(blocks, 0), minimum)

    return of


def _from_zero(q: Tensor) -> Tensor:
    return q + 128  # int8 -> 0..255


def _mxfp4(blocks: Tensor) -> SuperBlocks:
    scale = torch.exp2(blocks[:, :1].float() - 128).bfloat16()
    return SuperBlocks("MXFP4", _halves(blocks[:, 1:]), None, None, scale, None, FP4)


def _two_bits(q: Tensor) -> Tensor:
    """[blocks, 64] -> uint8 [blocks, 2, 4, 32]: bits 2 i of 32 bytes are the i-th 32 values of a half."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    bits: Tensor = q.unflatten(1, (2, 1, 32)) >> shifts & 3
    return bits


def _q2_k(blocks: Tensor) -> SuperBlocks:
    q, both = _two_bits(blocks[:, 16:80]).flatten(1), blocks[:, :16]
    return SuperBlocks("Q2_K", q, (both & 15).view(torch.int8), both >> 4, _half(blocks, 80), _half(blocks, 82))


def _q3_k(blocks: Tensor) -> SuperBlocks:
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (blocks[:, None, :32] >> bits & 1).unflatten(1, (2, 4))
    q = _two_bits(blocks[:, 32:96]) | high << 2
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    scales = _halves(blocks[:, 96:104]) | (blocks[:, None, 104:108] >> shifts & 3).flatten(1) << 4
    return SuperBlocks("Q3_K", q.flatten(1), scales.view(torch.int8) - 32, None, _half(blocks, 108), None)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes of 8 scales and 8 minima, 6 bits each -> (scales, minima), uint8 [blocks, 8].

    The first four of each are the low 6 bits of bytes 0-3 and 4-7; of the last four, bytes 8-11 hold the low 4 bits, and the
    high 2 bits of bytes 0-7 the rest.
    """
    low, middle, last = packed.unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([low & 63, (last & 15) | (low >> 2 & 48)], 1)
    minima = torch.cat([middle & 63, (last >> 4) | (middle >> 2 & 48)], 1)
    return scales, minima


def _with_minima(kind: Kind, blocks: Tensor, q: Tensor) -> SuperBlocks:
    """q uint8 [blocks, 8, 32]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    return SuperBlocks(kind, q.flatten(1), scales.view(torch.int8), minima, _half(blocks, 0), _half(blocks, 2))


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
    return SuperBlocks("Q6_K", q, blocks[:, 192:208].contiguous().view(torch.int8), None, _half(blocks, 208), None)


def _iq4_xs(blocks: Tensor) -> SuperBlocks:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = (blocks[:, 2:4, None] >> shifts & 3).flatten(1)
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], 2).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    q = _halves(blocks[:, 8:].unflatten(1, (8, 16))).flatten(1)
    return SuperBlocks("VALUES_32", q, scales, None, _half(blocks, 0), None, NL)


def _ternary(q: Tensor, scale: Tensor) -> SuperBlocks:
    return SuperBlocks("TERNARY", q, torch.ones(len(q), 8, dtype=torch.int8), None, scale, None)


def _tq1_0(blocks: Tensor) -> SuperBlocks:
    """A byte is its five trits as a fraction of base 3: three times it is the first one, and the rest of the fraction."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    parts = (blocks[:, None, :32] * powers, blocks[:, None, 32:48] * powers, blocks[:, None, 48:52] * powers[:4])
    fractions = torch.cat([part.flatten(1) for part in parts], 1)
    return _ternary((fractions.to(torch.int16) * 3 >> 8).to(torch.uint8), _half(blocks, 52))


def _tq2_0(blocks: Tensor) -> SuperBlocks:
    return _ternary(_two_bits(blocks[:, :64]).flatten(1), _half(blocks, 64))


_READERS: dict[str, Callable[[Tensor], SuperBlocks]] = {  # uint8 [blocks, bytes] -> tables [blocks, ...]
    "Q4_0": _flat("Q4_0", _halves),
    "Q4_1": _flat("Q4_1", _halves, has_minimum=True),
    "Q5_0": _flat("Q5_0", _five_bits),
    "Q5_1": _flat("Q5_1", _five_bits, has_minimum=True),
    "Q8_0": _flat("Q8_0", _from_zero),
    "IQ4_NL": _flat("IQ4_NL", _halves),
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    **gguf_codebooks.READERS,
}
