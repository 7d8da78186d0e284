"""The kernel that groups rows against its reference."""

from __future__ import annotations

import pytest
import torch

from kernels import group_rows as kernel


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("rows, groups", [(1, 1), (1, 8), (40, 3), (333, 20), (2100, 5)])
def test_rows_are_grouped_in_their_order(rows: int, groups: int, block_m: int) -> None:
    ids = torch.randint(-1, groups, (rows,), generator=torch.Generator().manual_seed(rows)).int()
    made, expected = kernel.group_rows(ids, groups, block_m), kernel.reference_groups(ids, groups, block_m)
    assert torch.equal(made.tile_group, expected.tile_group)
    used = int((expected.tile_group >= 0).sum()) * block_m
    assert made.rows.shape == expected.rows.shape
    assert torch.equal(made.rows[:used], expected.rows[:used])


@pytest.mark.parametrize("block_m", [16, 64])
def test_there_are_tiles_for_the_worst_grouping(block_m: int) -> None:
    for sizes in ([1] * 9, [block_m + 1] * 3, [2 * block_m, 1, 0, 1], [0, 0]):
        ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).int()
        made = kernel.group_rows(ids, len(sizes), block_m)
        needed = sum(-(-size // block_m) for size in sizes)
        assert (made.tile_group >= 0).sum() == needed <= len(made.tile_group)
        assert len(made.rows) == len(made.tile_group) * block_m
