"""Chunks of prompts that divide no image, for models whose tokens of an image see all of each other (Gemma 3).

Such a chunk either takes in the rest of the image in which it would end, where the step has room, or ends ahead of it.
"""

from __future__ import annotations

from itertools import groupby

from backend.api.images import FIRST_ID
from backend.core.sequence import Sequence


class WholeImages:
    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int]]] = {}  # by sequence: where its images begin and end, in order

    def cut(self, rows: list[Sequence], wants: list[int], shares: list[int], most: int) -> list[int]:
        """`shares` of the tokens that rows want, changed so that none ends within an image. most: tokens of all together."""
        left, found = most - sum(shares), []
        for seq, want, share in zip(rows, wants, shares, strict=True):
            start = seq.num_tokens - want
            end = start + share
            for first, last in self.runs(seq) if share else ():
                if first < end < last:
                    end = last if last - end <= left else max(start, first)
                    break
            left -= end - start - share
            found.append(end - start)
        return found

    def runs(self, seq: Sequence) -> list[tuple[int, int]]:
        """Where the images of a sequence begin, and one past their ends."""
        if not seq.request.images:
            return []
        if (known := self._runs.get(seq.seq_id)) is None:
            known = self._runs[seq.seq_id] = _runs(seq)
        return known

    def forget(self, seq: Sequence) -> None:
        self._runs.pop(seq.seq_id, None)


def _runs(seq: Sequence) -> list[tuple[int, int]]:
    found, at = [], 0
    for is_image, group in groupby(seq.token_ids, lambda token_id: token_id >= FIRST_ID):
        size = sum(1 for _ in group)
        if is_image:
            found.append((at, at + size))
        at += size
    return found
