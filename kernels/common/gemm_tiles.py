"""Choice of a quantised product's tiles, and of how many programs k is split over (split-K: Hoque et al., arXiv 2402.00025)."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

T = TypeVar("T")

PROGRAMS = 132  # programs that fill a GPU: one for each SM of an H200
SPLIT_UP_TO = 64  # rows up to which k is split
MAX_SPLITS = 8
MIN_STEPS = 4  # the smallest number of steps along k in a split


class GroupTiles(NamedTuple):
    """Tiles of a product whose steps along k are the groups of the weight's columns."""

    block_m: int  # rows of x
    block_n: int  # features
    num_warps: int
    num_stages: int


def tiles_of(table: dict[int | None, T], m: int) -> T:
    """The tiles of the smallest bucket that holds m rows; the bucket None holds any number."""
    return table[next((bucket for bucket in table if bucket is None or m <= bucket), None)]


def splits_of(m: int, programs: int, steps: int, even: bool) -> int:
    """The number of splits of k, a power of two. `programs` is their number in one split, `steps` the number of steps along k.

    With `even`, all splits have the same number of steps.
    """
    splits = 1
    if m <= SPLIT_UP_TO:
        while splits < MAX_SPLITS and programs * splits < PROGRAMS and steps >= 2 * splits * MIN_STEPS:
            if even and steps % (2 * splits):
                break
            splits *= 2
    return splits
