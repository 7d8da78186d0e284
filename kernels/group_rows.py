"""Sorts rows into tiles by group.

A product for each group is then a product of whole tiles; LoRA's groups are the tokens of one adapter. As in vLLM's
moe_align_block_size and SGLang, the rows of a group are gathered into tiles of `block_m` rows. `rows` lists them by group, in
their order, with -1 where the last tile of a group is not full. The number of tiles depends on shapes alone, so nothing waits for
the device and a CUDA graph can hold the launches; unused tiles belong to group -1. A row whose id is -1 is in no tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_runtime import Variant, jit, next_power_of_two, runs_on, tl


class Groups(NamedTuple):
    """Rows sorted into tiles by group, made once for all products with the same ids."""

    ids: Tensor  # int32 [rows]: the group of each row; -1 means none
    rows: Tensor  # int32 [tiles * block_m]: indices into ids, or -1 for padding; undefined in tiles of group -1
    tile_group: Tensor  # int32 [tiles]: the group of each tile; -1 means unused
    block_m: int


def reference_groups(ids: Tensor, groups: int, block_m: int) -> Groups:
    """The result of `group_rows` for the same arguments, computed on the host."""
    rows: list[int] = []
    tile_group: list[int] = []
    of_rows = ids.tolist()
    for group in range(groups):
        own = [row for row, id_ in enumerate(of_rows) if id_ == group]
        own += [-1] * (-len(own) % block_m)
        rows += own
        tile_group += [group] * (len(own) // block_m)
    unused = _max_tiles(len(of_rows), groups, block_m) - len(tile_group)
    rows += [-1] * (unused * block_m)
    tile_group += [-1] * unused
    return Groups(ids, _int32(rows, ids), _int32(tile_group, ids), block_m)


def group_rows(ids: Tensor, groups: int, block_m: int) -> Groups:
    """Group rows by their id: ids int32 [rows], each below `groups`; a row of id -1 is in no group."""
    if not runs_on(ids):
        return reference_groups(ids, groups, block_m)
    tiles = _max_tiles(len(ids), groups, block_m)
    rows = torch.empty(tiles * block_m, dtype=torch.int32, device=ids.device)
    tile_group = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    block = min(1024, max(32, next_power_of_two(len(ids))))
    padded = max(16, next_power_of_two(groups))
    _group_kernel[(groups,)](
        ids, rows, tile_group, len(ids), groups, tiles, GROUPS_PADDED=padded, BLOCK_M=block_m, BLOCK=block
    )
    return Groups(ids, rows, tile_group, block_m)


@jit(do_not_specialize=["count", "tiles"])
def _group_kernel(
    ids,  # [count] int32
    rows,  # [tiles * BLOCK_M] int32
    tile_group,  # [tiles] int32
    count,
    groups,
    tiles,
    GROUPS_PADDED: tl.constexpr,  # a power of two
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Each group has a program, which counts the rows of all groups: that needs no second launch and no atomics, and the order is
    # always the same.
    group = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    every = tl.arange(0, GROUPS_PADDED)
    sizes = tl.zeros([GROUPS_PADDED], tl.int32)
    for start in range(0, count, BLOCK):
        row = start + lane
        id_ = tl.load(ids + row, row < count, other=-1)
        sizes += tl.histogram(id_, GROUPS_PADDED, (id_ >= 0) & (id_ < groups))
    needed = (sizes + (BLOCK_M - 1)) // BLOCK_M
    size = tl.sum(tl.where(every == group, sizes, 0), 0)
    first = tl.sum(tl.where(every < group, needed, 0), 0)
    end = first + tl.sum(tl.where(every == group, needed, 0), 0)

    own = rows + first * BLOCK_M
    written = 0
    for start in range(0, count, BLOCK):
        row = start + lane
        same = tl.load(ids + row, row < count, other=-1) == group
        tl.store(own + written + tl.cumsum(same.to(tl.int32), 0) - 1, row, same)
        written += tl.sum(same.to(tl.int32), 0)
    padding = size + tl.arange(0, BLOCK_M)
    tl.store(own + padding, tl.full([BLOCK_M], -1, tl.int32), padding < (end - first) * BLOCK_M)

    for start in range(0, tiles, BLOCK):
        tile = start + lane
        mask = (tile >= first) & (tile < tiles)
        if group < groups - 1:
            mask = mask & (tile < end)
        tl.store(tile_group + tile, tl.where(tile < end, group, -1), mask)


def _max_tiles(rows: int, groups: int, block_m: int) -> int:
    return (rows + min(groups, rows) * (block_m - 1)) // block_m


def _int32(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def variants() -> dict[str, Variant]:
    """Eight groups, in tiles for generation steps."""
    types = dict.fromkeys(("ids", "rows", "tile_group"), "*i32") | dict.fromkeys(("count", "groups", "tiles"), "i32")
    return {"group-8": Variant(_group_kernel, types, {"GROUPS_PADDED": 16, "BLOCK_M": 16, "BLOCK": 1024})}
