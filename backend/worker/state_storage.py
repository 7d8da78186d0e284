"""StateStorage: the states of recurrent layers, one pool for each of them. The state of a slot's sequence has the slot's number.

states    0 .. num_slots - 1                    of what runs: a step reads and writes them
          num_slots .. num_states - 1           snapshots: behind whole blocks of tokens, given out by kvcache/states.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.core.step import Row
from kernels.common.state_rows import StateRows
from kernels.common.triton_runtime import runs_at
from kernels.cpu.memory import allocate


class StateStorage:
    def __init__(self, config: ModelConfig, num_states: int, device: torch.device) -> None:
        """config: a rank's part of a model with recurrent layers."""
        assert config.recurrence is not None
        self._device = device
        shape = num_states, config.recurrence.state_size
        self.pools: list[Tensor] = []
        for _ in range(config.num_recurrent_layers):
            is_on_cpu = device.type == "cpu"
            self.pools.append(allocate(shape, torch.float32) if is_on_cpu else torch.zeros(shape, device=device))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states (source, destination); all sources are read before a destination is written."""
        if not pairs:
            return
        sources, destinations = (list(numbers) for numbers in zip(*pairs, strict=True))
        for pool in self.pools:
            pool[destinations] = pool[sources]

    def rows(self, rows: Sequence[Row]) -> StateRows:
        """The states that the rows of a step read and write."""
        starts = np.concatenate(([0], np.cumsum([row.num_tokens for row in rows]))).astype(np.int64)
        numbers = [
            (row.slot if row.num_computed else -1, row.slot, row.num_tokens - len(row.drafts) - row.num_guesses)
            for row in rows
        ]
        saves = [
            (index, at - row.num_computed, state)
            for index, row in enumerate(rows)
            for at, state in row.saves
            if row.num_computed < at <= row.num_computed + row.num_tokens
        ]
        shape = (-1, 3)
        given = StateRows(starts, np.array(numbers, np.int32).reshape(shape), np.array(saves, np.int32).reshape(shape))
        return given.placed_on(self._device) if runs_at(self._device) else given
