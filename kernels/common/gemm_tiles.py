"""Which tiles a quantised product uses, and over how many programs k is split (split-K: Hoque et al., arXiv 2402.00025)."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

T = TypeVar("T")

PROGRAMS = 132  # that fill a GPU: an H200's SMs
SPLIT_UP_TO = 64  # rows
MAX_SPLITS = 8
MIN_STEPS = 4  # along k that a split is worth


class GroupTiles(NamedTuple):
    """Of a product whose step along k is a group of the weight's columns."""

    block_m: int  # rows of x
    block_n: int  # features
    num_warps: int
    num_stages: int


def tiles_of(table: dict[int | None, T], m: int) -> T:
    """Of the least bucket of rows that holds m; None holds any."""
    return table[next((bucket for bucket in table if bucket is None or m <= bucket), None)]


def splits_of(m: int, programs: int, steps: int, even: bool) -> int:
    """A power of two; `programs` are those of a split, `steps` all along k. even: each split has as many."""
    splits = 1
    if m <= SPLIT_UP_TO:
        while splits < MAX_SPLITS and programs * splits < PROGRAMS and steps >= 2 * splits * MIN_STEPS:
            if even and steps % (2 * splits):
                break
            splits *= 2
    return splits
