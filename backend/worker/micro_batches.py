"""Micro-batches: consecutive parts of a step's flat batch. The stages of a pipeline work on different ones at the same time.

    tokens of a step     | row 0 | row 1                 | row 2 |
    micro-batches        | 0                 | 1                 |      row 1 is cut, as a chunked prompt is

A token's bits do not depend on the micro-batch that it is in, because they depend neither on the rows beside it nor on chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class MicroBatch(NamedTuple):
    numbers: NDArray[np.int32]  # [rows, 4], as InputBatch.row_numbers makes them
    rows: slice  # the rows of the step that these are, or are parts of
    tokens: slice  # range within the step's tokens
    logits: slice  # range within the step's tokens that yield logits


def micro_batches(numbers: NDArray[np.int32], count: int) -> list[MicroBatch]:
    """Cut a step into `count` micro-batches of about as many tokens each, or into single tokens where it has fewer.

    numbers: [rows, 4] slot, computed tokens, tokens to run, how many of its last tokens yield logits.
    """
    ends = np.cumsum(numbers[:, 2])
    total = int(ends[-1])
    count = min(count, total)
    borders = [total * index // count for index in range(count + 1)]
    found: list[MicroBatch] = []
    num_logits = 0
    for first, end in zip(borders, borders[1:]):
        rows = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, end, "left")) + 1)
        part = _within(numbers[rows], ends[rows], first, end)
        logits = slice(num_logits, num_logits + int(part[:, 3].sum()))
        found.append(MicroBatch(part, rows, slice(first, end), logits))
        num_logits = logits.stop
    return found


def _within(numbers: NDArray[np.int32], ends: NDArray[np.int64], first: int, end: int) -> NDArray[np.int32]:
    """The parts of these rows that lie within tokens `first` to `end` of the step; `ends`: where each row ends."""
    starts = ends - numbers[:, 2]
    kept_from, kept_to = np.maximum(starts, first), np.minimum(ends, end)
    logits_from = np.maximum(ends - numbers[:, 3], kept_from)  # the first of the kept tokens that yields logits
    part = numbers.copy()
    part[:, 1] += (kept_from - starts).astype(np.int32)
    part[:, 2] = kept_to - kept_from
    part[:, 3] = np.maximum(kept_to - logits_from, 0)
    return part
