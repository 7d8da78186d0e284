"""StateRows: which states of recurrent layers the rows of a step read and write.

A state lies in a pool, one for each recurrent layer: float32 [states, numbers]. A row begins with the state `source`, or with
zeros at the beginning of its sequence, and leaves what it has behind its first `count` tokens in the state `target`: draft tokens
behind these run too, but no state keeps them. `saves` are further copies, behind other numbers of tokens.

Within a step, no state is written twice, and a row's source is written by no row but, as its target, by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.common.transfer import even, place

ROW_NUMBERS = 8  # numbers of a row in PlacedRows.rows, the last two of which say nothing


class PlacedRows(NamedTuple):
    """StateRows as Triton kernels read them: int32 tensors on a device, each aligned to 16 bytes, parts of one copy.

    A piece of a row is a run of its tokens behind which a state is written, or behind which the row ends. The pieces of a row
    follow each other, and cover its tokens.
    """

    rows: (
        Tensor  # [rows, ROW_NUMBERS]: first token, source, target, count, the first piece, and the one behind the last
    )
    pieces: Tensor  # [pieces, 2]: the token behind the last one, and the state that is written there, or -1
    row_of_token: Tensor  # [tokens]


class StateRows(NamedTuple):
    starts: NDArray[np.int64]  # [rows + 1]: the first token of each row in the flat batch, and the number of tokens
    numbers: NDArray[np.int32]  # [rows, 3]: source (-1: zeros), target (-1: none is written), count
    saves: NDArray[np.int32]  # [saves, 3]: row, tokens of the row, state; in the order of rows, then of tokens
    placed: PlacedRows | None = None  # on the device of the layers, so that all of them share a copy

    def writes_of(self, row: int) -> Iterator[tuple[int, int]]:
        """(tokens of the row, the state that is written behind them)."""
        _, target, count = self.numbers[row].tolist()
        if target >= 0:
            yield count, target
        for _, tokens, state in self.saves[self.saves[:, 0] == row].tolist():
            yield tokens, state

    def on(self, device: torch.device) -> PlacedRows:
        """`placed`, or a copy that is made now."""
        return self._placed(device) if self.placed is None else self.placed

    def placed_on(self, device: torch.device) -> StateRows:
        """The same rows with `placed`."""
        return self._replace(placed=self._placed(device))

    def _placed(self, device: torch.device) -> PlacedRows:
        num_rows, num_tokens = len(self.numbers), int(self.starts[-1])
        writes = self._writes()
        first_piece = np.searchsorted(writes[:, 0], np.arange(num_rows + 1))
        pieces_at = num_rows * ROW_NUMBERS
        tokens_at = pieces_at + 2 * even(len(writes))
        table = np.zeros(tokens_at + num_tokens, np.int32)
        rows = table[:pieces_at].reshape(num_rows, ROW_NUMBERS)
        rows[:, 0], rows[:, 1:4] = self.starts[:-1], self.numbers
        rows[:, 4], rows[:, 5] = first_piece[:-1], first_piece[1:]
        pieces = table[pieces_at : pieces_at + 2 * len(writes)].reshape(-1, 2)
        pieces[:, 0], pieces[:, 1] = self.starts[writes[:, 0]] + writes[:, 1], writes[:, 2]
        table[tokens_at:] = np.repeat(np.arange(num_rows), np.diff(self.starts))
        placed = place(table, device)
        of_pieces = placed[pieces_at : pieces_at + 2 * len(writes)]
        return PlacedRows(placed[:pieces_at].view(-1, ROW_NUMBERS), of_pieces.view(-1, 2), placed[tokens_at:])

    def _writes(self) -> NDArray[np.int64]:
        """[pieces, 3]: row, tokens of the row, the state that is written behind them; -1 where the row only ends."""
        lengths, (_, target, count) = np.diff(self.starts), self.numbers.T
        row, writes = np.arange(len(lengths)), target >= 0
        only_ends = ~(writes & (count == lengths))
        only_ends[self.saves[self.saves[:, 1] == lengths[self.saves[:, 0]], 0]] = False
        of_targets, ends = np.stack((row, count, target), 1), np.stack((row, lengths, np.full_like(row, -1)), 1)
        found: NDArray[np.int64] = np.concatenate((of_targets[writes], self.saves, ends[only_ends])).astype(np.int64)
        order: NDArray[np.int64] = np.lexsort((found[:, 1], found[:, 0]))
        return np.take(found, order, axis=0)
