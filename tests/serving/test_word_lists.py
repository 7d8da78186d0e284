from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import InvalidRequest
from backend.api.config.schema import LimitsConfig
from backend.serving.wires.word_lists import decode_word_list, encode_word_lists

LIMITS = LimitsConfig(max_words=3, max_word_tokens=4)


def matrix(ids: list[int], ends: list[int]) -> np.ndarray:
    return np.array([ids, ends], np.int32)


@given(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=3),
    st.integers(0, 5),
)
def test_words_come_back_from_their_encoding_whatever_the_padding(words: list[list[int]], padding: int) -> None:
    ids = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    width = max(len(ids), len(ends)) + padding
    encoded = matrix(ids + [0] * (width - len(ids)), ends + [-1] * (width - len(ends)))
    assert decode_word_list("w", encoded, LIMITS) == words


@pytest.mark.parametrize("empty", [None, np.zeros((2, 0), np.int32), matrix([0], [-1]), matrix([0, 0], [-1, -1])])
def test_an_absent_or_empty_list_holds_no_words(empty: np.ndarray | None) -> None:
    assert decode_word_list("w", empty, LIMITS) == []


@pytest.mark.parametrize(
    ("ids", "ends", "message"),
    [
        ([1, 2, 3], [1, -1, 3], "Sparse list must not have"),
        ([1, 2, 3], [2, 1, -1], "strictly increasing"),
        ([1, 2, 3], [2, 2, -1], "strictly increasing"),
        ([1, 2, 3], [0, 2, -1], "strictly increasing"),
        ([1, 2, 3], [-2, 2, -1], "strictly increasing"),
        ([1, 2, 3], [1, 4, -1], "beyond the 3 ids"),
        ([1, 2, 3], [2**31 - 1, -1, -1], "beyond the 3 ids"),
        ([1] * 5, [1, 2, 3, 4, -1], "4 words, the limit is 3"),
        ([1] * 5, [5, -1, -1, -1, -1], "5 tokens, the limit is 4"),
    ],
)
def test_a_malformed_or_oversized_list_is_refused(ids: list[int], ends: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decode_word_list("stop_words_list", matrix(ids, ends), LIMITS)


def test_ten_thousand_words_are_refused_before_a_list_is_built() -> None:
    encoded = matrix([1] * 10_000, list(range(1, 10_001)))
    with pytest.raises(InvalidRequest, match="10000 words, the limit is 3; send fewer"):
        decode_word_list("stop_words_list", encoded, LIMITS)


@pytest.mark.parametrize("rows", [[[[5], [8, 2]]], [[[1, 2, 3]], [], [[4], [5], [6]]], [[]]])
def test_what_is_encoded_is_decoded_again(rows: list[list[list[int]]]) -> None:
    encoded = encode_word_lists(rows)
    assert encoded.dtype == np.int32 and encoded.shape[:2] == (len(rows), 2)
    assert [decode_word_list("words", row, LimitsConfig()) for row in encoded] == rows


def test_a_row_without_words_is_what_upstream_makes_of_it() -> None:
    assert encode_word_lists([[], [[]]]).tolist() == [[[0], [-1]], [[0], [-1]]]
