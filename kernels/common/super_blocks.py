"""Weights in super-blocks of 256 columns, which the native CPU kernels multiply as they are (native/super_blocks.h).

A super-block has d and perhaps e, both float16; a group of its columns has s, an int8, and perhaps m of 0 .. 127. The first
three kinds are llama.cpp's. `mixed` holds rows of all three.

    kind     group    weight
    Q4_K     32       d * s * q - e * m           q 0 .. 15
    Q5_K     32       d * s * q - e * m           q 0 .. 31
    Q6_K     16       d * s * (q - 32)            q 0 .. 63
    mixed    16       d * s * (q - 32) - e * m    q 0 .. 63
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

COLUMNS = 256  # columns of a super-block
Kind = Literal["Q4_K", "Q5_K", "Q6_K", "mixed"]
GROUP: dict[Kind, int] = {"Q4_K": 32, "Q5_K": 32, "Q6_K": 16, "mixed": 16}
_CENTRE: dict[Kind, int] = {"Q4_K": 0, "Q5_K": 0, "Q6_K": 32, "mixed": 32}


class SuperBlocks(NamedTuple):
    """A weight [n, k], k a multiple of COLUMNS."""

    kind: Kind
    q: Tensor  # uint8 [n, k]
    scales: Tensor  # int8 [n, k / group]
    minima: Tensor | None  # uint8 [n, k / group]; None for Q6_K
    scale: Tensor  # float16 [n, k / COLUMNS]
    minimum: Tensor | None  # like scale; None where there are no minima


def floats(weight: SuperBlocks) -> Tensor:
    """float32 [n, k]. The order of the operations is that of llama.cpp, so that the results are the same bits."""
    group = GROUP[weight.kind]
    values: Tensor = (weight.q.float() - _CENTRE[weight.kind]).unflatten(1, (-1, group))
    values *= _of_groups(weight.scale, weight.scales)[:, :, None]
    if weight.minima is not None and weight.minimum is not None:
        values -= _of_groups(weight.minimum, weight.minima)[:, :, None]
    return values.flatten(1)


def stack(parts: Sequence[SuperBlocks]) -> SuperBlocks:
    """The rows of all, exactly: parts of several kinds become `mixed`."""
    if len({part.kind for part in parts}) > 1:
        parts = [_mixed(part) for part in parts]
    first = parts[0]
    return SuperBlocks(
        first.kind,
        torch.cat([part.q for part in parts]),
        torch.cat([part.scales for part in parts]),
        _stacked([part.minima for part in parts]),
        torch.cat([part.scale for part in parts]),
        _stacked([part.minimum for part in parts]),
    )


def _mixed(part: SuperBlocks) -> SuperBlocks:
    repeats = GROUP[part.kind] // GROUP["mixed"]
    scales = part.scales.repeat_interleave(repeats, 1)
    minima = torch.zeros_like(scales, dtype=torch.uint8)
    if part.minima is not None:
        minima = part.minima.repeat_interleave(repeats, 1)
    minimum = torch.zeros_like(part.scale) if part.minimum is None else part.minimum
    q = part.q + (_CENTRE["mixed"] - _CENTRE[part.kind])
    return SuperBlocks("mixed", q, scales, minima, part.scale, minimum)


def _of_groups(of_blocks: Tensor, of_groups: Tensor) -> Tensor:
    """float32 [n, groups]: the products of a super-block's number with those of its groups."""
    return of_blocks.float().repeat_interleave(of_groups.shape[1] // of_blocks.shape[1], 1) * of_groups.float()


def _stacked(tables: list[Tensor | None]) -> Tensor | None:
    """None if the parts have none: those of one kind agree."""
    present = [table for table in tables if table is not None]
    return torch.cat(present) if present else None
