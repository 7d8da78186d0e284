"""StateRows: which states of recurrent layers the rows of a step read and write.

A state lies in a pool, one for each recurrent layer: float32 [states, numbers]. A row begins with the state `source`, or with
zeros at the beginning of its sequence, and leaves what it has behind its first `count` tokens in the state `target`: draft tokens
behind these run too, but no state keeps them. `saves` are further copies, behind other numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StateRows(NamedTuple):
    starts: NDArray[np.int64]  # [rows + 1]: the first token of each row in the flat batch, and the number of tokens
    numbers: NDArray[np.int32]  # [rows, 3]: source (-1: zeros), target (-1: none is written), count
    saves: NDArray[np.int32]  # [saves, 3]: row, tokens of the row, state; in the order of rows, then of tokens

    def writes_of(self, row: int) -> Iterator[tuple[int, int]]:
        """(tokens of the row, the state that is written behind them)."""
        _, target, count = self.numbers[row].tolist()
        if target >= 0:
            yield count, target
        for _, tokens, state in self.saves[self.saves[:, 0] == row].tolist():
            yield tokens, state
