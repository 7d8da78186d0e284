"""Chunks of prompts that divide no image."""

from __future__ import annotations

import pytest

from backend.api import Request
from backend.api.images import FIRST_ID, ImageInput
from backend.core.sequence import Sequence
from backend.scheduler.whole_images import WholeImages


def sequence(*sizes: int) -> Sequence:
    """Ten tokens of text ahead of each image, and behind the last."""
    ids = [token for size in sizes for token in [*[1] * 10, *[FIRST_ID + 5] * size]] + [1] * 10
    seq = Sequence(1, 1, Request([1], 4, images=(ImageInput(7, 1, "00" * 32, {}),)), 0, 0)
    seq.token_ids = ids
    return seq


@pytest.mark.parametrize(
    ("computed", "share", "most", "expected"),
    [
        (0, 8, 100, 8),  # within text
        (0, 10, 100, 10),  # ahead of the first image
        (0, 11, 100, 30),  # its rest is taken in
        (0, 30, 100, 30),
        (0, 35, 100, 35),
        (0, 45, 60, 60),
        (0, 45, 59, 40),  # there is no room for it
        (10, 5, 24, 20),
        (10, 5, 19, 0),  # the image waits for a step with room
        (17, 5, 24, 13),  # KV of its first tokens was found
        (17, 5, 12, 0),
        (60, 3, 3, 3),
    ],
)
def test_a_chunk_ends_ahead_of_an_image_or_behind_it(computed: int, share: int, most: int, expected: int) -> None:
    seq = sequence(20, 20)
    assert WholeImages().cut([seq], [seq.num_tokens - computed], [share], most) == [expected]


def test_some_row_gets_its_image_whatever_the_others_have() -> None:
    rows = [sequence(20) for _ in range(4)]
    for row in rows:
        row.token_ids = row.token_ids[10:]
    shares = WholeImages().cut(rows, [row.num_tokens for row in rows], [5] * 4, 20)
    assert sum(shares) <= 20 and 20 in shares
    assert WholeImages().cut(rows[:2], [rows[0].num_tokens] * 2, [0, 7], 20) == [0, 20]
