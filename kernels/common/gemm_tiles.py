"""Choice of a quantised product's tiles, and of how many programs k is split over (split-K: Hoque et al., arXiv 2402.00025)."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")

PROGRAMS = 132  # programs that fill a GPU: one for each SM of an H200
BUCKETS = (16, 64, 256)  # numbers of rows up to which tiles are chosen together; with more, k is not split
MAX_SPLITS = 8
MIN_STEPS = 4  # the smallest number of steps along k in a split


class GroupTiles(NamedTuple):
    """Tiles of a product whose steps along k are the groups of the weight's columns."""

    block_m: int  # rows of x
    block_n: int  # features
    num_warps: int
    num_stages: int


class GemmTiles(Protocol):
    """The sizes by which a product is cut into programs."""

    @property
    def block_m(self) -> int: ...

    @property
    def block_n(self) -> int: ...


def tiles_of(table: dict[int | None, T], m: int) -> T:
    """The tiles for m rows, from a table with tiles for each of BUCKETS and, under None, for more rows."""
    return table[_bucket_of(m)]


def splits_of(m: int, tiles: GemmTiles, n: int, steps: int, even: bool) -> int:
    """The number of splits of k, a power of two, for m rows and n features; `steps` is the number of steps along k.

    It is the same for all m of a bucket, so that float sums of a row do not change with m. With `even`, all splits have the same
    number of steps.
    """
    bucket, splits = _bucket_of(m), 1
    if bucket is not None:
        programs = -(-bucket // tiles.block_m) * -(-n // tiles.block_n)
        while splits < MAX_SPLITS and programs * splits < PROGRAMS and steps >= 2 * splits * MIN_STEPS:
            if even and steps % (2 * splits):
                break
            splits *= 2
    return splits


def _bucket_of(m: int) -> int | None:
    return next((bucket for bucket in BUCKETS if m <= bucket), None)
