"""Inputs of prompts other than tokens, for each slot: embeddings of ids beyond the vocabulary, and positions.

Token id `vocab + n` of a prompt stands for row n of the request's table. Behind the positions that a request gives, they go on
by one for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.core.step import NewRow, Row


class SlotPrompt(NamedTuple):
    virtual: NDArray[np.int64]  # places in the prompt whose embedding comes from the table
    vectors: Tensor | None  # [virtual, hidden]
    positions: NDArray[np.int64] | None  # [prompt]


class Embedded(NamedTuple):
    """Rows of a flat batch whose embeddings are given."""

    where: Tensor  # [n] int64
    vectors: Tensor  # [n, hidden]


class PromptInputs:
    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._vocab_size, self._dtype, self._device = vocab_size, dtype, device
        self._slots: dict[int, SlotPrompt] = {}  # only of sequences that bring something

    def set_row(self, row: NewRow) -> None:
        """Take note of the sequence that takes a slot."""
        if row.prompt_embeddings is None and row.position_ids is None:
            self._slots.pop(row.slot, None)
            return
        ids = np.array(row.token_ids[: row.num_prompt_tokens], dtype=np.int64)
        virtual = (ids >= self._vocab_size).nonzero()[0]
        vectors = None
        if row.prompt_embeddings is not None:
            data = np.frombuffer(row.prompt_embeddings.data, dtype=np.float32).reshape(row.prompt_embeddings.shape)
            vectors = torch.from_numpy(data[ids[virtual] - self._vocab_size]).to(self._device, self._dtype)
        positions = None if row.position_ids is None else np.array(row.position_ids, dtype=np.int64)
        self._slots[row.slot] = SlotPrompt(virtual, vectors, positions)

    def has_any(self, rows: Sequence[Row]) -> bool:
        return bool(self._slots) and any(row.slot in self._slots for row in rows)

    def apply(self, rows: Sequence[Row], positions: Tensor) -> tuple[Tensor, Embedded | None]:
        """The positions of a step's flat batch [tokens] as the requests want them, and the embeddings that they give."""
        if not self._slots:
            return positions, None
        moved = positions
        where: list[NDArray[np.int64]] = []
        vectors: list[Tensor] = []
        start = 0
        for row in rows:
            given = self._slots.get(row.slot)
            end = row.num_computed + row.num_tokens
            if given is not None and given.positions is not None:
                moved = positions.clone() if moved is positions else moved
                places = _positions(given.positions, row.num_computed, end)
                moved[start : start + row.num_tokens] = torch.from_numpy(places).to(self._device)
            if given is not None and given.vectors is not None:
                first, last = np.searchsorted(given.virtual, (row.num_computed, end))
                where.append(given.virtual[first:last] - row.num_computed + start)
                vectors.append(given.vectors[first:last])
            start += row.num_tokens
        if not vectors:
            return moved, None
        return moved, Embedded(torch.from_numpy(np.concatenate(where)).to(self._device), torch.cat(vectors))


def _positions(given: NDArray[np.int64], start: int, end: int) -> NDArray[np.int64]:
    """Positions of tokens `start` to `end`: those that were given, then one more for each further token."""
    places = np.arange(start, end)
    beyond = given[-1] + 1 + places - len(given)
    return np.where(places < len(given), given[np.minimum(places, len(given) - 1)], beyond)
