"""Adding up splits against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import merge_splits as kernel
from tests.kernels.numbers import assert_near, random_tensor


def made(
    heads: int,
    head_dim: int,
    split: int,
    lengths: tuple[int, ...],
    window: int | None,
    sink_tokens: int = 0,
    room: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns parts, stats, lengths, out; what belongs to no split of a row is NaN. room: splits beyond the longest row's."""
    splits = -(-max(lengths) // split) + room
    parts = random_tensor(len(lengths), heads, splits, head_dim)
    stats = torch.stack(
        (3 * random_tensor(*parts.shape[:3], seed=1), random_tensor(*parts.shape[:3], seed=2).abs() + 1), -1
    )
    for row, length in enumerate(lengths):
        first = max(0, length - window) // split if window else 0
        for unused in (
            slice(-(-sink_tokens // split), max(first, -(-sink_tokens // split))),
            slice(-(-length // split), None),
        ):
            parts[row, :, unused], stats[row, :, unused] = torch.nan, torch.nan
    out = torch.full((len(lengths), heads, head_dim), torch.nan)
    return parts, stats, torch.tensor(lengths, dtype=torch.int32), out


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_the_splits_of_each_row_are_weighed_and_no_others_are_read(
    case: tuple[int, int, int, tuple[int, ...], int, int], with_sinks: bool
) -> None:
    heads, head_dim, split, lengths, window, sink_tokens = case
    *given, out = made(*case)
    expected = out.clone()
    sinks = random_tensor(heads, seed=3) if with_sinks else None
    kernel.merge_splits(*given, out, split, window, sinks, sink_tokens)
    kernel.reference(*given, expected, split, window, sinks, sink_tokens)
    assert_near(out, expected)
    assert not out[given[2] == 0].any()


def test_room_for_more_splits_changes_no_bit() -> None:
    parts, stats, lengths, wide = made(2, 32, 4, (70, 133), 0, room=50)
    narrow = torch.empty_like(wide)
    kernel.merge_splits(parts, stats, lengths, wide, 4)
    kernel.merge_splits(parts[:, :, :-50].contiguous(), stats[:, :, :-50].contiguous(), lengths, narrow, 4)
    assert torch.equal(narrow, wide)
