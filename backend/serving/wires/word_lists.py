"""Reads and writes TensorRT-LLM's tensors of words, stop_words_list and bad_words_list. One row of a batch is INT32 [2, L].

    [[ 5, 8, 2],      the token ids of all words one after the other, here of the words (5) and (8 2), padded with 0
     [ 1, 3, -1]]     the position behind the end of each word, strictly increasing, padded with -1

A list without words has L = 0, or a second row that begins with -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.api import InvalidRequest
from backend.api.config.schema import LimitsConfig


def decode_word_list(name: str, matrix: NDArray[Any] | None, limits: LimitsConfig) -> list[list[int]]:
    """The words as lists of token ids. Raises InvalidRequest for a tensor that is malformed or over the limits."""
    if matrix is None or matrix.size == 0:
        return []
    ids, ends = matrix
    num_words = int(np.argmax(ends == -1)) if (ends == -1).any() else len(ends)
    if (ends[num_words:] != -1).any():
        raise InvalidRequest(f"Invalid format for word list {name}: Sparse list must not have values after a -1")
    if num_words > limits.max_words:
        raise InvalidRequest(f"{name} holds {num_words} words, the limit is {limits.max_words}; send fewer")
    if num_words == 0:
        return []
    lengths = np.diff(ends[:num_words].astype(np.int64), prepend=0)
    if (lengths <= 0).any():
        raise InvalidRequest(f"Invalid format for word list {name}: offsets must be positive and strictly increasing")
    if ends[num_words - 1] > len(ids):
        raise InvalidRequest(
            f"Invalid format for word list {name}: offset {ends[num_words - 1]} is beyond the {len(ids)} ids given"
        )
    if lengths.max() > limits.max_word_tokens:
        raise InvalidRequest(
            f"{name} holds a word of {lengths.max()} tokens, the limit is {limits.max_word_tokens}; use shorter words"
        )
    stops = ends[:num_words].tolist()
    return [ids[start:stop].tolist() for start, stop in zip([0, *stops], stops)]


def encode_word_lists(rows: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.int32]:
    """The words of each row as INT32 [rows, 2, L]; L is 1 where no row has a word. Words without tokens are left out."""
    words = [[list(word) for word in row if word] for row in rows]
    width = max(1, *(sum(map(len, row)) for row in words)) if words else 1
    array = np.zeros((len(rows), 2, width), np.int32)
    array[:, 1] = -1
    for n, row in enumerate(words):
        ids = [token_id for word in row for token_id in word]
        array[n, 0, : len(ids)] = ids
        array[n, 1, : len(row)] = np.cumsum([len(word) for word in row]) if row else []
    return array
