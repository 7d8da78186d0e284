"""InputBatch: what a rank remembers of each slot, and the flat batch that it makes of a step's rows.

    slots    token_ids [num_slots, max_seq_len], block tables [num_slots, max_blocks], lengths
    step     the flat batch: the tokens that run now, row after row, without padding

All state is indexed by slot, so a row that stays in its slot costs nothing between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from backend.core.step import NewRow, Row, SampledToken
from backend.layers.rotary import RotaryTables
from backend.worker.prompt_inputs import Embedded, OwnInputs, PromptInputs
from kernels.common.transfer import even, place
from kernels.paged_attention import AttentionRows

SlotMemory = tuple[Tensor, NDArray[np.int32]]  # token ids int64 [slots, max_seq_len], block tables [slots, max_blocks]


@dataclass(slots=True)
class FlatBatch:
    """One step's tokens of all rows, without padding."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    cells: Tensor  # [num_tokens] int64: where each token's KV is written
    rows: AttentionRows
    logits_index: Tensor  # int64 into the flat batch: the tokens whose logits are wanted
    embedded: Embedded | None = None  # tokens whose embeddings the requests give
    tables: RotaryTables | None = (
        None  # cos and sin of each token, in which `positions` are places; None: the model's own
    )


def make_tensor_with_pad(rows: Sequence[Sequence[int]], width: int, pad: int, dtype: DTypeLike) -> NDArray[Any]:
    """An array [len(rows), width] of rows of up to `width` numbers, each filled up with `pad`."""
    out = np.full((len(rows), width), pad, dtype=dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


class InputBatch:
    def __init__(
        self,
        num_slots: int,
        max_seq_len: int,
        block_size: int,
        device: torch.device,
        prompt_inputs: PromptInputs | None = None,
        memory: SlotMemory | None = None,
    ) -> None:
        """`prompt_inputs`: of the tier that takes them. memory: where token ids and block tables lie; None: memory of its own."""
        self._prompt_inputs = prompt_inputs
        self._block_size = block_size
        self._device = device
        self._max_blocks = -(-max_seq_len // block_size)
        self.max_seq_len = max_seq_len
        if memory is None:
            tables = np.empty((num_slots, self._max_blocks), dtype=np.int32)
            memory = torch.zeros(num_slots, max_seq_len, dtype=torch.int64, device=device), tables
        self.token_ids, self.block_tables = memory
        self.block_tables.fill(-1)
        self._host_ids = self.token_ids.numpy() if device.type == "cpu" else None  # the same memory, for single tokens
        self.num_blocks = [0] * num_slots
        self.adapters = [""] * num_slots  # content of each slot's LoRA adapter; empty = none
        self.num_tokens = [0] * num_slots

    def take_in(self, rows: list[NewRow]) -> None:
        """Store new rows, replacing all that is known of their slots."""
        if not rows:
            return
        slots = [row.slot for row in rows]
        self.block_tables[slots] = make_tensor_with_pad([row.block_ids for row in rows], self._max_blocks, -1, np.int32)
        for row in rows:
            self.num_tokens[row.slot] = len(row.token_ids)
            self.num_blocks[row.slot] = len(row.block_ids)
            self.adapters[row.slot] = row.adapter
            if self._prompt_inputs is not None:
                self._prompt_inputs.set_row(row)
        if self._host_ids is not None:
            for row in rows:
                self._host_ids[row.slot, : len(row.token_ids)] = row.token_ids
            return
        places = [np.arange(len(row.token_ids)) + row.slot * self.max_seq_len for row in rows]
        ids = [np.array(row.token_ids, dtype=np.int64) for row in rows]
        placed = place(np.stack((np.concatenate(places), np.concatenate(ids))), self._device)
        self.token_ids.view(-1).index_copy_(0, placed[0], placed[1])

    def append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        start = self.num_blocks[slot]
        self.block_tables[slot, start : start + len(block_ids)] = block_ids
        self.num_blocks[slot] = start + len(block_ids)

    def put_drafts(self, row: Row) -> None:
        """Write a row's drafts behind the known tokens of its slot, which they do not become part of."""
        start = self.num_tokens[row.slot]
        if self._host_ids is not None:
            self._host_ids[row.slot, start : start + len(row.drafts)] = row.drafts
            return
        drafts = np.array(row.drafts, dtype=np.int64)
        self.token_ids[row.slot, start : start + len(row.drafts)] = place(drafts, self._device)

    def append_tokens(self, samples: list[SampledToken]) -> None:
        """Append each sampled token to its slot's ids. A token at max_seq_len is counted but not stored: it can never run."""
        if self._host_ids is not None:
            for sample in samples:
                end = self.num_tokens[sample.slot]
                if end < self.max_seq_len:
                    self._host_ids[sample.slot, end] = sample.token_id
                self.num_tokens[sample.slot] = end + 1
            return
        ends = [self.num_tokens[sample.slot] for sample in samples]
        places = [(sample.slot, end, sample.token_id) for sample, end in zip(samples, ends) if end < self.max_seq_len]
        if places:
            placed = place(np.array(places, dtype=np.int64).T, self._device)
            self.token_ids[placed[0], placed[1]] = placed[2]
        self.count_tokens([sample.slot for sample in samples])

    def count_tokens(self, slots: Sequence[int]) -> None:
        """Count one more token in each slot, when the token itself is written by others (the device)."""
        for slot in slots:
            self.num_tokens[slot] += 1

    def brings_inputs(self, rows: Sequence[Row]) -> bool:
        """True if a row's prompt has embeddings or positions of its own."""
        return self._prompt_inputs is not None and self._prompt_inputs.has_any(rows)

    def own_inputs(self, rows: Sequence[Row]) -> OwnInputs:
        """The positions of a step's tokens, and what requests give, as PromptInputs.apply returns it."""
        assert self._prompt_inputs is not None, "ask brings_inputs first"
        places = torch.cat([torch.arange(row.num_computed, row.num_computed + row.num_tokens) for row in rows])
        return self._prompt_inputs.apply(rows, places)

    def row_numbers(self, rows: list[Row], num_logits: Sequence[int]) -> NDArray[np.int32]:
        """An array [rows, 4]: slot, computed tokens, tokens to run, how many of its last tokens yield logits.

        The blocks of `rows` must have been appended. Raises IndexError when a slot knows fewer tokens or has too few blocks.
        """
        for row in rows:
            length = row.num_computed + row.num_tokens
            if (
                length > self.num_tokens[row.slot] + len(row.drafts)
                or length > self.num_blocks[row.slot] * self._block_size
            ):
                # Running it would read or write memory of another sequence.
                raise IndexError(
                    f"slot {row.slot} is to run up to token {length}, but it knows {self.num_tokens[row.slot]} tokens "
                    f"and has {self.num_blocks[row.slot]} blocks of {self._block_size}; engine and worker disagree"
                )
        numbers = [(row.slot, row.num_computed, row.num_tokens, wanted) for row, wanted in zip(rows, num_logits)]
        return np.array(numbers, dtype=np.int32)

    def flatten(self, rows: list[Row], num_logits: Sequence[int]) -> FlatBatch:
        """Assemble a step for torch operators. Raises IndexError as `row_numbers` does, and for a block that was released."""
        slots, computed, counts, wanted = self.row_numbers(rows, num_logits).T.astype(np.int64)
        starts = np.concatenate(([0], counts.cumsum()))
        lengths = computed + counts
        slot_of_token = np.repeat(slots, counts)
        positions = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], counts)
        blocks = self.block_tables[slot_of_token, positions // self._block_size].astype(np.int64)
        if blocks.min() < 0:
            raise IndexError(f"a token of step rows {[row.slot for row in rows]} lies in a block that was let go")
        cells = blocks * self._block_size + positions % self._block_size
        width = -(-int(lengths.max()) // self._block_size)
        logits_index = np.repeat(starts[1:] - wanted.cumsum(), wanted) + np.arange(wanted.sum())
        numbers = np.zeros((3, even(len(positions))), dtype=np.int64)
        numbers[:, : len(positions)] = slot_of_token * self.max_seq_len + positions, positions, cells
        placed = place(numbers, self._device)[:, : len(positions)]
        own = OwnInputs(placed[1])
        if self._prompt_inputs is not None:
            own = self._prompt_inputs.apply(rows, placed[1])
        return FlatBatch(
            token_ids=self.token_ids.view(-1).index_select(0, placed[0]),
            positions=own.positions,
            cells=placed[2],
            rows=AttentionRows(starts, lengths, self.block_tables[slots, :width], own.ends),
            logits_index=place(logits_index, self._device),
            embedded=own.embedded,
            tables=own.tables,
        )
