"""DeviceRunner: steps of a GPU. Its host part only queues work; tokens stay on the device until they are waited for.

    decode     every row runs one token and samples: padded to a size of LADDER, and replayed as a graph
    mixed      all other steps: the flat batch as the torch tier runs it, eagerly

Effects in order, all in one stream: grow, copy blocks, take in new rows, append blocks, run the model, choose, append the token
that was chosen to the slot's ids. What a decode step reads that changes lies in one table (`_Inputs`), sent in one copy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from backend.core.step import Row, StepInput, StepOutput
from backend.models.llama import Llama
from backend.sampling.device_choice import Chosen, DeviceChoice, FetchedSamples, Kind, Number
from backend.sampling.slots import SlotParameters
from backend.worker.graphs import Graphs
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from kernels.kv_format import PoolLayout
from kernels.paged_attention import DECODE_HEAD_DIMS, DevicePlan, DeviceRows, plan_attention
from kernels.transfer import place

LADDER = (1, 2, 4, 8, *range(16, 256, 8), *range(256, 513, 32))  # rows of a decode step; above it, multiples of 128
LEAST_WIDTH_TOKENS = 1024  # of the block tables of a decode step: this, or four times as often as it takes
NUM_BUFFERS = 2  # steps that may be under way


def ladder_size(rows: int) -> int:
    """The least size of a decode step that holds `rows`."""
    return next((size for size in LADDER if size >= rows), -(-rows // 128) * 128)


class QueuedStep:
    """A step under way."""

    def __init__(self, step_id: int, samples: FetchedSamples | None):
        self._step_id, self._samples = step_id, samples

    def wait(self) -> StepOutput:
        return StepOutput(self._step_id, [] if self._samples is None else self._samples.wait())


class DeviceRunner:
    def __init__(
        self,
        model: Llama,
        layout: PoolLayout,
        storage: KVStorage,
        batch: InputBatch,
        parameters: SlotParameters,
        graphs: Graphs,
    ):
        """batch: with one slot more than there are, which takes what padding writes."""
        self.storage = storage
        self.batch = batch
        self.graphs = graphs
        self._model, self._layout = model, layout
        self._parameters = parameters
        self._choice = DeviceChoice(parameters)
        self._device = model.embedding.device
        self._pad_slot = len(batch.num_tokens) - 1
        self._inputs: dict[tuple[int, int], _Inputs] = {}
        self._views = [layout.view(pool) for pool in storage.pools]

    def execute(self, step: StepInput) -> StepOutput:
        return self.launch(step).wait()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> QueuedStep:
        """Queue a step. Raises IndexError when a row names what its slot does not have."""
        self._prepare(step)
        if not step.rows:
            return QueuedStep(step.step_id, None)
        if all(row.num_tokens == 1 and row.samples for row in step.rows):
            samples = self._decode(step.rows)
        else:
            samples = self._run_mixed(step.rows)
        return QueuedStep(step.step_id, samples)

    def _prepare(self, step: StepInput) -> None:
        if step.num_blocks > self.storage.num_blocks:
            self.storage.grow(step.num_blocks)
            self._views = [self._layout.view(pool) for pool in self.storage.pools]
            self.graphs.clear()
        self.storage.copy_blocks(step.copies)
        self.batch.take_in(step.new_rows)
        for new_row in step.new_rows:
            self._parameters.set_row(new_row)
        for row in step.rows:
            if row.new_block_ids:
                self.batch.append_blocks(row.slot, row.new_block_ids)

    # --------------------------------------------------------------------------------------------------------- decode

    def _decode(self, rows: list[Row]) -> FetchedSamples:
        numbers = self.batch.row_numbers(rows, [1] * len(rows))
        slots, num_tokens = numbers[:, 0].tolist(), (numbers[:, 1] + 1).tolist()
        inputs = self._inputs_for(len(rows), int(numbers[:, 1].max()) + 1)
        self._choice.fill(inputs.numbers, slots, num_tokens, self._pad_slot)
        inputs.tables[: len(rows)] = self.batch.block_tables[slots, : inputs.width]
        inputs.send()
        kind = self._choice.kind(slots, num_tokens)
        if kind is Kind.SPECIAL:
            logits = self.graphs.run((inputs.key, kind), lambda: self._logits(inputs))
            numbers_here = inputs.device_numbers
            chosen = self._choice.choose_special(
                logits[: len(rows)], numbers_here[:, : len(rows)], slots, num_tokens, self.batch.token_ids
            )
            self._append(numbers_here[:, : len(rows)], chosen.tokens)
        else:
            chosen = Chosen(self.graphs.run((inputs.key, kind), lambda: self._logits_and_tokens(inputs, kind)), None)
        self.batch.count_tokens(slots)
        return self._choice.begin_fetch(slots, chosen)

    def _inputs_for(self, rows: int, length: int) -> _Inputs:
        """The table of the least shape that holds `rows` rows of `length` tokens."""
        most = self.batch.block_tables.shape[1]
        width = min(most, -(-LEAST_WIDTH_TOKENS // self._layout.block_size))
        while width * self._layout.block_size < length:
            width = min(most, 4 * width)
        key = ladder_size(rows), width
        if key not in self._inputs:
            self._inputs[key] = _Inputs(*key, self._device)
        return self._inputs[key]

    def _logits(self, inputs: _Inputs) -> Tensor:
        """Run the newest token of each row; [rows, vocab]. Reads nothing of the host."""
        block_size, max_len = self._layout.block_size, self.batch.max_seq_len
        known, tables = inputs.device_numbers[Number.KNOWN], inputs.device_tables
        position = (known - 1).clamp(min=0)
        token_ids = self.batch.token_ids.view(-1).index_select(
            0, inputs.device_numbers[Number.SLOT] * max_len + position
        )
        block = tables.gather(1, (position // block_size)[:, None])[:, 0].long()
        cells = torch.where(known > 0, block * block_size + position % block_size, -1)
        rows = DeviceRows(None, known.int(), tables)
        has_kernel = self._model.config.head_dim in DECODE_HEAD_DIMS
        if not has_kernel:
            rows = rows._replace(starts=torch.arange(inputs.rows + 1, dtype=torch.int32, device=self._device))
        plans = {
            window: DevicePlan(rows, None, window) if has_kernel else DevicePlan(None, rows, window)
            for window in set(self._model.config.windows)
        }
        hidden = self._model.forward(token_ids, position, cells, plans, self._views)
        return self._model.logits(hidden)

    def _logits_and_tokens(self, inputs: _Inputs, kind: Kind) -> Tensor:
        tokens = self._choice.choose(kind, self._logits(inputs), inputs.device_numbers)
        self._append(inputs.device_numbers, tokens)
        return tokens

    # ---------------------------------------------------------------------------------------------------------- mixed

    def _run_mixed(self, rows: list[Row]) -> FetchedSamples | None:
        config, batch = self._model.config, self.batch
        flat = batch.flatten(rows, [int(row.samples) for row in rows])
        plans = {
            window: plan_attention(
                flat.rows, self._layout.block_size, window, config.head_dim, self._model.dtype, self._device
            )
            for window in set(config.windows)
        }
        hidden = self._model.forward(flat.token_ids, flat.positions, flat.cells, plans, self._views)
        slots = [row.slot for row in rows if row.samples]
        if not slots:
            return None
        num_tokens = [batch.num_tokens[slot] for slot in slots]
        numbers = np.empty((len(Number), len(slots)), dtype=np.int64)
        self._choice.fill(numbers, slots, num_tokens, self._pad_slot)
        here = place(numbers, self._device)
        logits = self._model.logits(hidden[flat.logits_index])
        kind = self._choice.kind(slots, num_tokens)
        if kind is Kind.SPECIAL:
            chosen = self._choice.choose_special(logits, here, slots, num_tokens, batch.token_ids)
        else:
            chosen = Chosen(self._choice.choose(kind, logits, here), None)
        self._append(here, chosen.tokens)
        batch.count_tokens(slots)
        return self._choice.begin_fetch(slots, chosen)

    def _append(self, numbers: Tensor, tokens: Tensor) -> None:
        """Write tokens behind their slots' known ones. One that is full, and padding, write to the pad slot."""
        max_len, known = self.batch.max_seq_len, numbers[Number.KNOWN]
        place_of = torch.where(
            (known > 0) & (known < max_len), numbers[Number.SLOT] * max_len + known, self._pad_slot * max_len
        )
        self.batch.token_ids.view(-1).index_copy_(0, place_of, tokens)


class _Inputs:
    """What a decode step of `rows` rows reads that changes: numbers [Number, rows] int64, tables [rows, width] int32.

    On the device at one place; on the host in pinned memory, of which the buffers take turns while steps are under way.
    """

    def __init__(self, rows: int, width: int, device: torch.device):
        self.rows, self.width, self.key = rows, width, (rows, width)
        shape = (len(Number) * rows * 8 + rows * width * 4,)
        self._device = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._hosts = [
            torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(NUM_BUFFERS)
        ]
        self._turn = 0
        self.device_numbers, self.device_tables = self._views(self._device)
        self._arrays = [tuple(view.numpy() for view in self._views(host)) for host in self._hosts]

    @property
    def numbers(self) -> np.ndarray:
        """To be filled before `send`."""
        return self._arrays[self._turn][0]

    @property
    def tables(self) -> np.ndarray:
        return self._arrays[self._turn][1]

    def send(self) -> None:
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        self._turn = (self._turn + 1) % NUM_BUFFERS

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        size = len(Number) * self.rows * 8
        numbers = buffer[:size].view(torch.int64).view(len(Number), self.rows)
        return numbers, buffer[size:].view(torch.int32).view(self.rows, self.width)
