"""InputBatch: what a rank remembers of each slot, and the flat batch it makes of a step's rows.

    slots    token_ids [num_slots, max_seq_len], block tables [num_slots, max_blocks], lengths
    step     rows -> flat batch: generation rows first (one token each), then context rows

Everything is indexed by slot, so a row that stays costs nothing to keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.core.step import NewRow, Row, SampledToken
from kernels.paged_attention import AttentionRows


@dataclass(slots=True)
class FlatBatch:
    """One step's tokens of all rows, without padding."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    cells: Tensor  # [num_tokens] int64: where each token's KV is written
    rows: AttentionRows
    sample_rows: list[Row]  # rows that sample, in the order of `sample_index`
    sample_index: Tensor  # [num_samples] int64 into the flat batch


class InputBatch:
    def __init__(self, num_slots: int, max_seq_len: int, block_size: int, device: torch.device):
        self._block_size = block_size
        self._device = device
        max_blocks = -(-max_seq_len // block_size)
        self.token_ids = torch.zeros(num_slots, max_seq_len, dtype=torch.int64, device=device)
        self.block_tables = np.full((num_slots, max_blocks), -1, dtype=np.int64)
        self.num_blocks = [0] * num_slots
        self.num_tokens = [0] * num_slots

    def take_in(self, row: NewRow) -> None:
        """Replace all that is known of a slot."""
        self.token_ids[row.slot, : len(row.token_ids)] = torch.tensor(row.token_ids, device=self._device)
        self.num_tokens[row.slot] = len(row.token_ids)
        self.num_blocks[row.slot] = 0
        self.append_blocks(row.slot, row.block_ids)

    def append_blocks(self, slot: int, block_ids: list[int]) -> None:
        start = self.num_blocks[slot]
        self.block_tables[slot, start : start + len(block_ids)] = block_ids
        self.num_blocks[slot] = start + len(block_ids)

    def append_tokens(self, samples: list[SampledToken]) -> None:
        """Write each slot's newest token behind its known ones."""
        slots = [sample.slot for sample in samples]
        columns = [self.num_tokens[slot] for slot in slots]
        kept = [i for i, column in enumerate(columns) if column < self.token_ids.shape[1]]
        if kept:
            tokens = torch.tensor([samples[i].token_id for i in kept], device=self._device)
            self.token_ids[[slots[i] for i in kept], [columns[i] for i in kept]] = tokens
        for slot in slots:
            self.num_tokens[slot] += 1

    def flatten(self, rows: list[Row]) -> FlatBatch:
        """Assemble a step. The blocks of `rows` must have been appended."""
        generation = [row for row in rows if row.num_tokens == 1]
        context = [row for row in rows if row.num_tokens > 1]
        ordered = generation + context
        slots = np.array([row.slot for row in ordered])
        starts = np.array([row.num_computed for row in ordered])
        counts = np.array([row.num_tokens for row in ordered])
        ends = counts.cumsum()
        row_of_token = np.repeat(np.arange(len(ordered)), counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + starts[row_of_token]
        slot_of_token = slots[row_of_token]
        blocks = self.block_tables[slot_of_token, positions // self._block_size]
        cells = blocks * self._block_size + positions % self._block_size
        sampling = [i for i, row in enumerate(ordered) if row.samples]
        device_positions = self._to_device(positions)
        return FlatBatch(
            token_ids=self.token_ids[self._to_device(slot_of_token), device_positions],
            positions=device_positions,
            cells=self._to_device(cells),
            rows=self._attention_rows(generation, context),
            sample_rows=[ordered[i] for i in sampling],
            sample_index=self._to_device(ends[sampling] - 1),
        )

    def _attention_rows(self, generation: list[Row], context: list[Row]) -> AttentionRows:
        lengths = np.array([row.num_computed + 1 for row in generation], dtype=np.int64)
        longest = int(lengths.max(initial=0))
        width = -(-longest // self._block_size)
        tables = self.block_tables[[row.slot for row in generation], :width] if generation else np.zeros((0, 0), dtype=np.int64)
        return AttentionRows(
            generation_tables=self._to_device(tables),
            generation_lengths=self._to_device(lengths),
            max_generation_length=longest,
            context_tables=[self._to_device(self.block_tables[row.slot, : self.num_blocks[row.slot]]) for row in context],
            context_lengths=[(row.num_tokens, row.num_computed + row.num_tokens) for row in context],
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
