"""GGUF's blocks of the types IQ2 and IQ3: magnitudes from a codebook and signs -> SuperBlocks of sixteen values.

    IQ2_XXS  d, for each 32: 4 numbers of 8 magnitudes, 4 x 7 signs, s of 4 bits          w = d (2 s + 1) / 8 value, s for each 32
    IQ2_XS   d, 32 times 9 bits of a number and 7 signs, s                                the same, s for each 16
    IQ2_S    d, 32 numbers, 256 signs, 2 high bits of each number, s                      the same
    IQ3_XXS  d, 64 numbers of 4 magnitudes, for each 32: 4 x 7 signs, s                   w = d (2 s + 1) / 4 value, s for each 32
    IQ3_S    d, 64 numbers, a high bit of each, 256 signs, s                              w = d (2 s + 1) value, s for each 32

The eighth of seven signs makes the number of minuses even. Source: ggml-quants.c; the codebooks are in gguf_grids.py.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from backend.models.gguf_grids import PACKED
from kernels.common.super_blocks import Kind, SuperBlocks

_MINUS = 8  # the bit of an index that makes its value negative
_OF_IQ2, _OF_IQ3_XXS, _OF_IQ3_S = (
    (8, 25, 43, 0, 0, 0, 0, 0),
    (4, 12, 20, 28, 36, 44, 52, 62),
    (1, 3, 5, 7, 9, 11, 13, 15),
)


@cache
def _grid(name: str) -> Tensor:
    """uint8 [rows, 8 or 4] of the numbers of magnitudes."""
    packed = torch.frombuffer(bytearray(base64.b85decode(PACKED[name])), dtype=torch.uint8)
    width, row = (2, 8) if name.startswith("IQ2") else (4, 4)
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (packed[:, None] >> shifts & (1 << width) - 1).view(-1, row)


def _bits(content: Tensor) -> Tensor:
    """[blocks, n] bytes -> uint8 [blocks, 8 n], 0 or 1, the lowest first."""
    return (content[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _seven_signs(words: Tensor) -> Tensor:
    """int64 [blocks, n] of 4 x 7 bits -> uint8 [blocks, 32 n], with the eighth of each."""
    bits = words[:, :, None] >> torch.arange(0, 28, 7) & 127
    return _with_eighth(bits.flatten(1))


def _with_eighth(seven: Tensor) -> Tensor:
    """int64 [blocks, n] of 7 bits -> uint8 [blocks, 8 n]."""
    bits = (seven[:, :, None] >> torch.arange(7) & 1).to(torch.uint8)
    return torch.cat([bits, bits.sum(2, keepdim=True, dtype=torch.uint8) & 1], 2).flatten(1)


def _words(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Little-endian numbers, int64."""
    words = content.contiguous().view(dtype).long()
    return words & (0xFFFF if dtype == torch.int16 else 0xFFFFFFFF)


def _weight(
    kind: Kind,
    blocks: Tensor,
    name: str,
    numbers: Tensor,
    signs: Tensor,
    s: Tensor,
    values: tuple[int, ...],
    unit: float,
) -> SuperBlocks:
    """numbers [blocks, n] of rows of the codebook; signs and s as they are stored, a byte each."""
    magnitudes = _grid(name)[numbers.long()].flatten(1)
    both = (*values, *(-value for value in values))
    scales = (2 * s + 1).to(torch.int8)
    return SuperBlocks(
        kind,
        magnitudes | signs * _MINUS,
        scales,
        None,
        blocks[:, :2].contiguous().view(torch.float16),
        None,
        both,
        unit,
    )


def _nibbles(content: Tensor) -> Tensor:
    """Bytes [blocks, n] -> [blocks, 2 n], the low bits of each before its high ones."""
    return torch.stack([content & 15, content >> 4], 2).flatten(1)


def _iq2_xxs(blocks: Tensor) -> SuperBlocks:
    parts = blocks[:, 2:].unflatten(1, (8, 8))
    words = _words(parts[:, :, 4:], torch.int32).squeeze(2)
    numbers = parts[:, :, :4].flatten(1)
    return _weight("VALUES_32", blocks, "IQ2_XXS", numbers, _seven_signs(words), words >> 28, _OF_IQ2, 0.125)


def _iq2_xs(blocks: Tensor) -> SuperBlocks:
    words, s = _words(blocks[:, 2:66], torch.int16), _nibbles(blocks[:, 66:])
    return _weight("VALUES_16", blocks, "IQ2_XS", words & 511, _with_eighth(words >> 9), s, _OF_IQ2, 0.125)


def _iq2_s(blocks: Tensor) -> SuperBlocks:
    high = (blocks[:, 66:74, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(1)
    numbers = blocks[:, 2:34].long() | high.long() << 8
    return _weight(
        "VALUES_16", blocks, "IQ2_S", numbers, _bits(blocks[:, 34:66]), _nibbles(blocks[:, 74:]), _OF_IQ2, 0.125
    )


def _iq3_xxs(blocks: Tensor) -> SuperBlocks:
    words = _words(blocks[:, 66:], torch.int32)
    return _weight("VALUES_32", blocks, "IQ3_XXS", blocks[:, 2:66], _seven_signs(words), words >> 28, _OF_IQ3_XXS, 0.25)


def _iq3_s(blocks: Tensor) -> SuperBlocks:
    numbers = blocks[:, 2:66].long() | _bits(blocks[:, 66:74]).long() << 8
    signs, s = _bits(blocks[:, 74:106]), _nibbles(blocks[:, 106:])
    return _weight("VALUES_32", blocks, "IQ3_S", numbers, signs, s, _OF_IQ3_S, 1.0)


READERS: dict[str, Callable[[Tensor], SuperBlocks]] = {  # uint8 [blocks, bytes] -> tables [blocks, ...]
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
