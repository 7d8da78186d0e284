"""Steps over the states of recurrent layers, for tests of their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.common.state_rows import StateRows


class Given(NamedTuple):
    """A row of a step."""

    tokens: int
    source: int
    target: int
    drafts: int = 0
    saves: tuple[tuple[int, int], ...] = ()  # (tokens of the row, state)


def rows_of(given: Sequence[Given]) -> StateRows:
    starts = np.cumsum([0, *(row.tokens for row in given)])
    numbers = [(row.source, row.target, row.tokens - row.drafts) for row in given]
    saves = [(index, tokens, state) for index, row in enumerate(given) for tokens, state in row.saves]
    return StateRows(starts, *(np.array(each, np.int32).reshape(-1, 3) for each in (numbers, saves)))


def every_kind(lengths: Sequence[int]) -> list[Given]:
    """Rows of these lengths that begin and go on, in place and from elsewhere, with and without drafts and saves.

    Row i has the states 5 * i to 5 * i + 4: its own, two that it saves, another source, and one that stays as it was.
    """
    made = []
    for index, tokens in enumerate(lengths):
        own = 5 * index
        source = (own, -1, own + 3)[index % 3]
        saves = ((1 + tokens // 3, own + 1), (tokens, own + 2))
        target = -1 if index % 4 == 3 else own
        made.append(Given(tokens, source, target, min(tokens - 1, 2 * (index % 2)), saves))
    return made


def pool_of(num_states: int, *shape: int, seed: int = 0) -> Tensor:
    """Random states within rows of a wider pool, as the layers have them: [num_states, *shape]."""
    size = int(np.prod(shape))
    values = torch.randn(num_states, size + 11, generator=torch.Generator().manual_seed(seed))
    return values[:, 7 : 7 + size].unflatten(1, shape)


def chunks_of(tokens: int) -> list[list[int]]:
    """Ways to cut so many tokens, at least 3."""
    return [[tokens], [1] * tokens, [tokens - 1, 1], [1, tokens // 2, tokens - 1 - tokens // 2]]
