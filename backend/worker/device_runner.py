"""DeviceRunner: runs steps on a GPU. `launch` only queues work; sampled tokens stay on the device until `wait` fetches them.

    generation step    every row runs one token and samples; padded to a size of LADDER and replayed as a CUDA graph
    eager step         any other step, and each with a LoRA adapter; a flat batch, as the torch tier runs it
    with drafts        an eager step for which `launch` waits: which tokens are appended depends on what was sampled

The stages are those of pipeline.py, all in one stream. A graph holds the forward pass, and the choice of tokens where no logits
need changes (all kinds but Kind.SPECIAL). All inputs of a generation step that change lie in one buffer (`_Inputs`), which one
copy sends to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.config.schema import LoraSection
from backend.core.step import Row, SlotId, StepInput, StepOutput
from backend.layers.lora import StackedAdapted
from backend.models.decoder import Decoder, StepStates
from backend.sampling.device_choice import Chosen, DeviceChoice, FetchedSamples, Kind, Number
from backend.sampling.slots import SlotParameters
from backend.worker.adapters import make_stacks, stacked_adapters
from backend.worker.draft_model import DraftModel
from backend.worker.extra_outputs import ExtraOutputs, FetchedRows, Pass
from backend.worker.graphs import Graphs
from backend.worker.guided_rows import GuidedRows, GuidedStep
from backend.worker.input_batch import FlatBatch, InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.pipeline import Done, Pending, Runner, Samples, output_of, samples_of
from backend.worker.post_processors import Failure
from backend.worker.state_storage import StateStorage
from kernels.common.kv_format import PoolLayout
from kernels.common.transfer import even, place
from kernels.decode_attention import split_for
from kernels.paged_attention import DECODE_HEAD_DIMS, DevicePlan, DeviceRows, plan_attention

# Row counts that generation steps are padded to; above the last one, multiples of 128 are used.
LADDER = (1, 2, 4, 8, *range(16, 256, 8), *range(256, 513, 32))
# Tokens that the block tables of a generation step span: this many, multiplied by 4 until the longest row fits.
MIN_WIDTH_TOKENS = 1024
NUM_BUFFERS = 2  # host copies of the inputs, hence steps that may be in flight


def ladder_size(rows: int) -> int:
    """The smallest padded row count that holds `rows`."""
    return next((size for size in LADDER if size >= rows), -(-rows // 128) * 128)


class QueuedStep(NamedTuple):
    """A step in flight."""

    step: StepInput
    samples: FetchedSamples
    has_drafts: bool
    guided: GuidedStep
    gathered: Sequence[FetchedRows]
    failed: list[Failure]

    def settle(self) -> None:
        """Wait for the tokens, and advance the guides by them."""
        self.guided.accept(self.samples.wait())

    def wait(self) -> StepOutput:
        samples = self.samples.wait()
        return output_of(self.step, samples, self.has_drafts, self.guided, self.gathered, self.failed)


class Ran(NamedTuple):
    """The result of a step's forward pass."""

    logits: Tensor  # [samples, vocab]; not used where a graph has chosen
    numbers: Tensor | None = None  # the samples' parameters [Number, samples], if they are on the device already
    chosen: Chosen | None = None  # tokens that a graph has chosen and appended
    gathered: Sequence[FetchedRows] = ()


class DeviceRunner(Runner):
    def __init__(
        self,
        model: Decoder,
        layout: PoolLayout,
        storage: KVStorage,
        batch: InputBatch,
        parameters: SlotParameters,
        graphs: Graphs,
        extras: ExtraOutputs | None = None,
        guided: GuidedRows | None = None,
        lora: LoraSection = LoraSection(),  # noqa: B008 (immutable)
        lora_page_bytes: int = 0,
        draft_model: DraftModel | None = None,
        states: StateStorage | None = None,
    ) -> None:
        """`batch` has one slot more than the scheduler knows: the last one takes the writes of padding rows."""
        self._device = model.device
        self._stacks = make_stacks(model, lora.max_rank, lora.device_pages_per_block * lora_page_bytes)
        adapters = stacked_adapters(self._stacks, lora, self._device)
        super().__init__(storage, batch, adapters, parameters.set_row, extras, guided, draft_model, states)
        self.graphs = graphs
        self._model, self._layout = model, layout
        self._choice = DeviceChoice(parameters)
        self._pad_slot = len(batch.num_tokens) - 1
        self._split = split_for(self._pad_slot, model.config.num_kv_heads)
        self._guided_ahead: QueuedStep | None = (
            None  # the step ahead, if it has guided rows whose tokens may be in flight
        )
        self._inputs: dict[tuple[int, int], _Inputs] = {}
        self._kept_logits: Tensor | None = None
        self._nothing = Chosen(torch.empty(0, dtype=torch.int64, device=self._device), None)
        self._no_logits = torch.empty(0, model.config.vocab_size, dtype=model.dtype, device=self._device)
        self._views = [layout.view(pool) for pool in storage.pools]

    def execute(self, step: StepInput) -> StepOutput:
        return self.launch(step).wait()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Pending:
        """Queue the stages of pipeline.py. Raises IndexError when a row names a token or a block that its slot does not have."""
        step = self.prepare(step)
        passes, guided = self.extras.of_step(step.rows), self.guided.of_step(step.rows)
        samples = samples_of(step.rows, self.batch.num_tokens)
        kind = self._choice.kind(samples.slots, samples.num_tokens)
        is_generation = passes[-1].is_plain and self._only_generates(step.rows)
        ran = self._run_generation(step.rows, samples, kind) if is_generation else self._run(passes)
        failed = passes[-1].process(ran.logits, self.batch.token_ids, self.batch.num_tokens)
        logits = self._mask(ran.logits, guided)
        chosen = ran.chosen or self._choose(logits, ran.numbers, samples, kind)
        fetched = self._choice.begin_fetch(samples.slots, chosen)
        return self._finish(QueuedStep(step, fetched, samples.has_drafts, guided, ran.gathered, failed))

    def _grow(self, num_blocks: int) -> None:
        super()._grow(num_blocks)
        self._views = [self._layout.view(pool) for pool in self.storage.pools]
        self.graphs.clear()

    def _only_generates(self, rows: list[Row]) -> bool:
        """True if every row runs one token and samples, so that the step may be replayed as a graph."""
        if not rows or not all(row.num_tokens == 1 and row.samples for row in rows):
            return False
        if self.states is not None:  # which states a row reads is not among the inputs of a graph
            return False
        return not self.batch.brings_inputs(rows) and self.adapters.of_rows(self.batch, rows) is None

    def _mask(self, logits: Tensor, guided: GuidedStep) -> Tensor:
        """logits [samples, vocab] under the guides. The forward pass is queued: the device runs it while the host waits for the
        tokens of the step ahead and makes masks.
        """
        if guided and self._guided_ahead is not None:
            self._guided_ahead.settle()
        return guided.mask(logits)

    def _choose(self, logits: Tensor, numbers: Tensor | None, samples: Samples, kind: Kind) -> Chosen:
        """Choose a token for each sample, and append it to its slot's ids unless drafts are to be accepted first."""
        slots, num_tokens, has_drafts = samples
        if not slots:
            return self._nothing
        if numbers is None:
            numbers = self._numbers(slots, num_tokens)
        if kind is Kind.SPECIAL:
            chosen = self._choice.choose_special(logits, numbers, slots, num_tokens, self.batch.token_ids)
        else:
            chosen = Chosen(self._choice.choose(kind, logits, numbers), None)
        if not has_drafts:
            self._append_chosen(numbers, chosen.tokens)
        return chosen

    def _finish(self, queued: QueuedStep) -> Pending:
        """Count the tokens of a step. With drafts wait for it: which tokens are appended depends on what was sampled."""
        self._guided_ahead = queued if queued.guided and not queued.has_drafts else None
        if not queued.has_drafts:
            self.batch.count_tokens(queued.samples.slots)
            return queued
        output = queued.wait()
        self._append(output)
        return Done(output)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run generation steps of padding only, in the smallest and the largest shape, to compile kernels and allocate memory."""
        if self.states is not None:
            return  # its generation steps run eagerly
        for rows, tokens in ((1, 1), (self._pad_slot, self.batch.max_seq_len)):
            inputs = self._inputs_for(rows, tokens)
            self._choice.fill(inputs.numbers, [], [], self._pad_slot)
            inputs.send()
            for kind in Kind:
                for _ in range(2):  # the second run captures the graph
                    self._generation_step(inputs, kind)

    # ----------------------------------------------------------------------------------------------------- generation

    def _run_generation(self, rows: list[Row], samples: Samples, kind: Kind) -> Ran:
        """Run one token of each row, padded; chosen tokens are followed by those of padding rows."""
        numbers = self.batch.row_numbers(rows, [1] * len(rows))
        inputs = self._inputs_for(len(rows), int(numbers[:, 1].max()) + 1)
        self._choice.fill(inputs.numbers, samples.slots, samples.num_tokens, self._pad_slot)
        inputs.tables[: len(rows)] = self.batch.block_tables[samples.slots, : inputs.width]
        inputs.send()
        result = self._generation_step(inputs, kind)
        if kind is not Kind.SPECIAL:
            return Ran(self._no_logits, chosen=Chosen(result, None))
        return Ran(result[: len(rows)], inputs.device_numbers[:, : len(rows)])

    def _generation_step(self, inputs: _Inputs, kind: Kind) -> Tensor:
        """Returns tokens int64 [rows], already appended to their slots; for kind SPECIAL it returns logits [rows, vocab]."""
        step = self._shared_logits if kind is Kind.SPECIAL else partial(self._tokens, kind=kind)
        return self.graphs.run((inputs.key, kind), partial(step, inputs))

    def _inputs_for(self, rows: int, length: int) -> _Inputs:
        """The input buffer of the smallest shape that holds `rows` rows of up to `length` tokens."""
        max_width = self.batch.block_tables.shape[1]
        width = min(max_width, -(-MIN_WIDTH_TOKENS // self._layout.block_size))
        while width * self._layout.block_size < length:
            width = min(max_width, 4 * width)
        key = ladder_size(rows), width
        if key not in self._inputs:
            self._inputs[key] = _Inputs(*key, self._device)
        return self._inputs[key]

    def _logits(self, inputs: _Inputs) -> Tensor:
        """Run the newest token of each row; returns logits [rows, vocab]. It reads device memory only, so a graph can hold it."""
        block_size, max_len = self._layout.block_size, self.batch.max_seq_len
        known, tables = inputs.device_numbers[Number.KNOWN], inputs.device_tables
        position = (known - 1).clamp(min=0)
        token_ids = self.batch.token_ids.view(-1).index_select(
            0, inputs.device_numbers[Number.SLOT] * max_len + position
        )
        block = tables.gather(1, (position // block_size)[:, None])[:, 0].long()
        cells = torch.where(known > 0, block * block_size + position % block_size, -1)
        rows = DeviceRows(None, known.int(), tables)
        config = self._model.config
        has_kernel = config.head_dim in DECODE_HEAD_DIMS
        if not has_kernel:
            rows = rows._replace(starts=torch.arange(inputs.rows + 1, dtype=torch.int32, device=self._device))
        plans = {
            window: DevicePlan(
                rows if has_kernel else None, None if has_kernel else rows, window, self._split, config.sink_tokens
            )
            for window in set(config.windows)
        }
        hidden = self._model.forward(token_ids, position, cells, plans, self._views)
        return self._model.logits(hidden)

    def _shared_logits(self, inputs: _Inputs) -> Tensor:
        """Logits copied to a buffer that all graphs share; otherwise each graph would keep logits of its own alive."""
        logits = self._logits(inputs)
        if self._kept_logits is None or len(self._kept_logits) < inputs.rows:
            self._kept_logits = logits.new_empty(ladder_size(self._pad_slot), logits.shape[1])
        return self._kept_logits[: inputs.rows].copy_(logits)

    def _tokens(self, inputs: _Inputs, kind: Kind) -> Tensor:
        tokens = self._choice.choose(kind, self._logits(inputs), inputs.device_numbers)
        self._append_chosen(inputs.device_numbers, tokens)
        return tokens

    # ---------------------------------------------------------------------------------------------------------- eager

    def _run(self, passes: Sequence[Pass]) -> Ran:
        """Run a step eagerly, pass by pass; the last pass has the rows that sample."""
        gathered: list[FetchedRows] = []
        for each in passes:
            logits, outputs = self._no_logits, dict[str, Tensor]()
            if each.rows:
                hidden, flat = self._forward(each.rows, each.num_logits)
                if any(each.num_logits):
                    logits, outputs = self._model.logits_and(each.outputs, hidden[flat.logits_index])
            gathered += each.gather(logits, outputs, self.batch)
        return Ran(logits if each.is_plain else each.sampled(logits).float(), gathered=gathered)

    def _forward(self, rows: list[Row], num_logits: list[int]) -> tuple[Tensor, FlatBatch]:
        config, batch = self._model.config, self.batch
        flat = batch.flatten(rows, num_logits)
        block_size, dtype = self._layout.block_size, self._model.dtype
        plans = plan_attention(
            flat.rows,
            block_size,
            config.windows,
            config.head_dim,
            dtype,
            self._device,
            self._split,
            config.sink_tokens,
        )
        adapted = self._adapted(rows)
        states = None if self.states is None else StepStates(self.states.pools, self.states.rows(rows))
        hidden = self._model.forward(
            flat.token_ids, flat.positions, flat.cells, plans, self._views, flat.embedded, adapted, states, flat.tables
        )
        return hidden, flat

    def _adapted(self, rows: list[Row]) -> StackedAdapted | None:
        """The adapters of the flat batch; None when no row has one."""
        places = self.adapters.of_rows(self.batch, rows)
        if places is None:
            return None
        of_rows = np.array([-1 if each is None else each for each in places], dtype=np.int64)
        of_tokens = np.repeat(of_rows, [row.num_tokens for row in rows])
        return self._stacks.adapted(place(of_tokens, self._device).int())

    def _numbers(self, slots: list[SlotId], num_tokens: list[int]) -> Tensor:
        """The parameters [Number, slots] of what is sampled behind `num_tokens` tokens of each slot, on the device."""
        numbers = np.empty((len(Number), even(len(slots))), dtype=np.int64)
        self._choice.fill(numbers, slots, num_tokens, self._pad_slot)
        return place(numbers, self._device)[:, : len(slots)]

    def _append_chosen(self, numbers: Tensor, tokens: Tensor) -> None:
        """Append each token to its slot's ids. Padding rows, and slots at max_seq_len, write to the pad slot instead."""
        max_len, known = self.batch.max_seq_len, numbers[Number.KNOWN]
        place_of = torch.where(
            (known > 0) & (known < max_len), numbers[Number.SLOT] * max_len + known, self._pad_slot * max_len
        )
        self.batch.token_ids.view(-1).index_copy_(0, place_of, tokens)


class _Inputs:
    """The changing inputs of a generation step: numbers [Number, rows] int64 and block tables [rows, width] int32.

    The device buffer keeps its address. On the host there are NUM_BUFFERS pinned buffers, used alternately, so that one can be
    filled while the copy from another is in flight.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows, self.width, self.key = rows, width, (rows, width)
        self._columns = even(rows)
        shape = (len(Number) * self._columns * 8 + rows * width * 4,)
        self._device = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._hosts = [
            torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(NUM_BUFFERS)
        ]
        self._next = 0
        self.device_numbers, self.device_tables = self._views(self._device)
        views = map(self._views, self._hosts)
        self._arrays = [(numbers.numpy(), tables.numpy()) for numbers, tables in views]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The host buffer's numbers; fill them before `send`."""
        return self._arrays[self._next][0]

    @property
    def tables(self) -> NDArray[np.int32]:
        """The host buffer's block tables; fill them before `send`."""
        return self._arrays[self._next][1]

    def send(self) -> None:
        self._device.copy_(self._hosts[self._next], non_blocking=True)
        self._next = (self._next + 1) % NUM_BUFFERS

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        size = len(Number) * self._columns * 8
        numbers = buffer[:size].view(torch.int64).view(len(Number), self._columns)[:, : self.rows]
        return numbers, buffer[size:].view(torch.int32).view(self.rows, self.width)
