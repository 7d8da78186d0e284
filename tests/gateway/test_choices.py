"""The replies of one request, counted together: each has its own numbers, and none is the first one's."""

from __future__ import annotations

import pytest

from gateway.choices import total_usage
from gateway.triton_client import Usage


@pytest.mark.parametrize(
    ("usages", "per_prompt", "expected"),
    [
        # (prompt, completion, cached) of each choice; then prompt, completion, cached tokens of all
        ([(7, 4, 3)], 1, (7, 4, 3)),
        ([(7, 4, 6), (7, 2, 3), (7, 1, 6)], 3, (7, 7, 3)),  # cached for the others: what the second has computed
        ([(7, 4, 3), (9, 2, 5)], 1, (16, 6, 8)),
        ([(7, 4, 6), (7, 2, 3), (9, 1, 2), (9, 5, 8)], 2, (16, 12, 5)),
        ([], 1, (0, 0, 0)),
    ],
)
def test_a_prompt_counts_once_and_each_token_that_was_generated(
    usages: list[tuple[int, int, int]], per_prompt: int, expected: tuple[int, int, int]
) -> None:
    given = [Usage(*numbers, discarded_tokens=0, reasoning_tokens=index) for index, numbers in enumerate(usages)]
    told = total_usage(given, per_prompt)
    prompt, completion, cached = expected
    assert told == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(range(len(usages)))},
    }


def test_tokens_of_replies_that_were_left_out_are_generated_tokens() -> None:
    told = total_usage([Usage(7, 4, 3, discarded_tokens=9), Usage(7, 4, 6)], 2)
    assert (told["completion_tokens"], told["total_tokens"]) == (17, 24)
