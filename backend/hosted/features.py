"""The result of a vision tower for an image."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Features(NamedTuple):
    """In the type that the model computes in."""

    vectors: Tensor  # [tokens, hidden]: in the place of embeddings
    grid: tuple[int, int] = (0, 0)  # with M-RoPE: rows and columns
    added: tuple[Tensor, ...] = ()  # each [tokens, hidden]: what the first layers add to their results (deepstack)
