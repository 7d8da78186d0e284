"""Weights in blocks of columns, as llama.cpp's types have them, which the native CPU kernels multiply as they are.

    flat     blocks of 32 columns          weight = d * v, or d * v - e
    super    super-blocks of 256 columns   weight = d * unit * s * v, or d * s * v - e * m

v is q - centre, or values[q]. d and e are a block's; s (int8) and m (0 .. 127) those of a group of a super-block. The
mixed kinds hold rows of several kinds exactly: `k mix` of Q2_K to Q6_K and TERNARY, `mix 32` and `mix 16` of all, with d and e in
float32. FORMS is the table; native/super_blocks.h has the same rows, and says how they lie in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal[
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TERNARY",
    "VALUES_32", "VALUES_16", "k mix", "mix 32", "mix 16",
]  # fmt: skip
NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's kvalues_iq4nl
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice those of e2m1


class Form(NamedTuple):
    columns: int  # columns of a block
    bits: int
    group: int
    has_minima: bool
    centre: int = 0
    values: tuple[int, ...] | None = None  # the numbers that q stands for; () where each weight has its own
    dtype: torch.dtype = torch.float16  # the type of d and e

    @property
    def is_super(self) -> bool:
        return self.columns > 32


FORMS: dict[Kind, Form] = {
    "Q4_0": Form(32, 4, 32, False, 8),
    "Q4_1": Form(32, 4, 32, True),
    "Q5_0": Form(32, 5, 32, False, 16),
    "Q5_1": Form(32, 5, 32, True),
    "Q8_0": Form(32, 8, 32, False, 128),
    "IQ4_NL": Form(32, 4, 32, False, values=NL),
    "MXFP4": Form(32, 4, 32, False, values=FP4, dtype=torch.bfloat16),
    "Q2_K": Form(256, 2, 16, True),
    "Q3_K": Form(256, 3, 16, False, 4),
    "Q4_K": Form(256, 4, 32, True),
    "Q5_K": Form(256, 5, 32, True),
    "Q6_K": Form(256, 6, 16, False, 32),
    "TERNARY": Form(256, 2, 32, False, 1),
    "VALUES_32": Form(256, 4, 32, False, values=()),
    "VALUES_16": Form(256, 4, 16, False, values=()),
    "k mix": Form(256, 6, 16, True, 32),
    "mix 32": Form(32, 8, 32, True, 128, dtype=torch.float32),
    "mix 16": Form(32, 8, 16, True, 128, dtype=torch.float32),
}
_OF_K_MIX = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TERNARY", "k mix")


class SuperBlocks(NamedTuple):
    """A weight [n, k], k a multiple of the columns of a block. A table that the kind has not is None."""

    kind: Kind
    q: Tensor  # uint8 [n, k]
    scales: Tensor | None  # s: int8 [n, k / group]
    minima: Tensor | None  # m: uint8 [n, k / group]
    scale: Tensor  # d: [n, k / columns]; of flat kinds [n, k / group]
    minimum: Tensor | None  # e: like scale
    values: tuple[int, ...] = NL  # 16 int8, where q is looked up
    unit: float = 1.0  # a power of two

    @property
    def form(self) -> Form:
        return FORMS[self.kind]

    def rows(self, part: slice) -> SuperBlocks:
        """Some rows."""
        tables = [None if table is None else table[part] for table in self.tables]
        return self.of_tables(*tables)

    @property
    def tables(self) -> tuple[Tensor | None, ...]:
        """q, s, m, d and e."""
        return self.q, self.scales, self.minima, self.scale, self.minimum

    def of_tables(self, *tables: Tensor | None) -> SuperBlocks:
        """The same kind of weight with other `tables`."""
        q, scales, minima, scale, minimum = tables
        assert q is not None and scale is not None
        return self._replace(q=q, scales=scales, minima=minima, scale=scale, minimum=minimum)


def floats(weight: SuperBlocks) -> Tensor:
    """float32 [n, k]. The order of the operations is that of llama.cpp, so that the results are the same bits."""
    values = _signed(weight).float().unflatten(1, (-1, weight.form.group))
    scale, minimum = _of_groups(weight)
    values *= scale[:, :, None]
    if minimum is not None:
        values -= minimum[:, :, None]
    flat: Tensor = values.flatten(1)
    return flat


def stack(parts: Sequence[SuperBlocks]) -> SuperBlocks:
    """The rows of all, exactly: parts of several kinds become one of the mixed kinds."""
    first = parts[0]
    if any((part.kind, part.values, part.unit) != (first.kind, first.values, first.unit) for part in parts):
        if all(part.kind in _OF_K_MIX for part in parts):
            parts = [_k_mix(part) for part in parts]
        else:
            group = min(part.form.group for part in parts)
            parts = [_mix(part, group) for part in parts]
        first = parts[0]
    return first.of_tables(*map(_stacked, zip(*(part.tables for part in parts), strict=True)))


def _k_mix(part: SuperBlocks) -> SuperBlocks:
    form, to = part.form, FORMS["k mix"]
    assert part.scales is not None
    repeats = form.group // to.group
    scales = part.scales.repeat_interleave(repeats, 1)
    minima = torch.zeros_like(scales, dtype=torch.uint8)
    if part.minima is not None:
        minima = part.minima.repeat_interleave(repeats, 1)
    minimum = torch.zeros_like(part.scale) if part.minimum is None else part.minimum
    return SuperBlocks("k mix", part.q + (to.centre - form.centre), scales, minima, part.scale, minimum)


def _mix(part: SuperBlocks, group: int) -> SuperBlocks:
    scale, minimum = (
        None if table is None else table.repeat_interleave(part.form.group // group, 1) for table in _of_groups(part)
    )
    assert scale is not None
    minimum = torch.zeros_like(scale) if minimum is None else minimum
    q = (_signed(part).to(torch.int16) + 128).to(torch.uint8)
    return SuperBlocks("mix 16" if group == 16 else "mix 32", q, None, None, scale, minimum)


def _signed(weight: SuperBlocks) -> Tensor:
    """v, int16 [n, k]."""
    if weight.form.values is not None:
        return torch.tensor(weight.values, dtype=torch.int16)[weight.q.int()]
    return weight.q.to(torch.int16) - weight.form.centre


def _of_groups(weight: SuperBlocks) -> tuple[Tensor, Tensor | None]:
    """The factors of v and the numbers that are subtracted then, float32 [n, groups]."""
    scale, minimum = weight.scale.float(), weight.minimum
    if weight.scales is None:
        return scale, None if minimum is None else minimum.float()
    repeats = weight.form.columns // weight.form.group
    scale = (scale * weight.unit).repeat_interleave(repeats, 1) * weight.scales.float()
    if minimum is None or weight.minima is None:
        return scale, None
    return scale, minimum.float().repeat_interleave(repeats, 1) * weight.minima.float()


def _stacked(tables: tuple[Tensor | None, ...]) -> Tensor | None:
    """None if the parts have none: those of one kind agree."""
    present = [table for table in tables if table is not None]
    return torch.cat(present) if present else None
