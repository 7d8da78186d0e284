"""DeviceRunner: runs steps on a GPU. `launch` only queues work; sampled tokens stay on the device until `wait` fetches them.

    generation step    every row runs one token and samples; padded to a size of LADDER and replayed as a CUDA graph
    mixed step         any other step, and each with a LoRA adapter; a flat batch that runs eagerly, as the torch tier runs it
    with drafts        likewise, and `launch` waits for it, and for a draft model's guesses: what follows depends on the tokens

Effects in order, all in one stream: let adapters go and come, grow the KV pool, copy blocks, store new rows, append blocks, let
the draft model guess, run the model, choose tokens, append each chosen token to its slot's ids. All inputs of a generation step
that change lie in one buffer (`_Inputs`), which one copy sends to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.config import LoraSection
from backend.core.step import Row, SlotId, StepInput, StepOutput
from backend.layers.lora import StackedAdapted
from backend.models.llama import Llama
from backend.sampling.device_choice import Chosen, DeviceChoice, FetchedSamples, Kind, Number
from backend.sampling.slots import SlotParameters
from backend.worker.draft_model import DraftModel
from backend.worker.extras import Extras, ExtraWork, FetchedRows, fetch_all
from backend.worker.graphs import Graphs
from backend.worker.guided_rows import GuidedRows, GuidedStep
from backend.worker.input_batch import FlatBatch, InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.model_runner import Done, Pending, prepare, right_samples
from backend.worker.stacked_adapters import make_stacks, stacked_adapters
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

    step_id: int
    samples: FetchedSamples
    gathered: Sequence[FetchedRows] = ()  # of each pass
    failed: Sequence[tuple[int, str]] = ()
    guided: GuidedStep | None = None

    def settle(self) -> None:
        """Wait for the tokens, and let the guides go on by them."""
        if self.guided is not None:
            self.guided.accept(self.samples.wait())

    def wait(self) -> StepOutput:
        samples, gathered = self.samples.wait(), fetch_all(self.gathered)
        failed = list(self.failed)
        if self.guided is not None:
            failed += self.guided.accept(samples)
            samples = self.guided.told(samples)
        debug_tensors = self.gathered[-1].wait_for_debug() if self.gathered else {}  # they come with the last pass
        return StepOutput(self.step_id, samples, gathered, failed, debug_tensors)


class DeviceRunner:
    def __init__(
        self,
        model: Llama,
        layout: PoolLayout,
        storage: KVStorage,
        batch: InputBatch,
        parameters: SlotParameters,
        graphs: Graphs,
        extras: Extras | None = None,
        guided: GuidedRows | None = None,
        lora: LoraSection = LoraSection(),  # noqa: B008 (immutable)
        lora_page_bytes: int = 0,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`batch` has one slot more than the scheduler knows: the last one takes the writes of padding rows."""
        self.storage = storage
        self.batch = batch
        self.graphs = graphs
        self._model, self._layout = model, layout
        self._parameters = parameters
        self._choice = DeviceChoice(parameters)
        self._device = model.embedding.device
        self._pad_slot = len(batch.num_tokens) - 1
        self._split = split_for(self._pad_slot, model.config.num_kv_heads)
        self._extras = extras or Extras()
        self._guided = guided or GuidedRows(None, 0, 0)
        self.draft_model = draft_model
        self._guided_before: QueuedStep | None = None  # the step ahead, if it had guided rows
        self._inputs: dict[tuple[int, int], _Inputs] = {}
        self._kept_logits: Tensor | None = None
        self._nothing = Chosen(torch.empty(0, dtype=torch.int64, device=self._device), None)
        self._views = [layout.view(pool) for pool in storage.pools]
        self._stacks = make_stacks(model, lora.max_rank, lora.device_pages_per_block * lora_page_bytes)
        self.adapters = stacked_adapters(self._stacks, lora, self._device)

    def execute(self, step: StepInput) -> StepOutput:
        return self.launch(step).wait()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Pending:
        """Queue a step. Raises IndexError when a row names a token or a block that its slot does not have."""
        self.adapters.update(step)
        if step.num_blocks > self.storage.num_blocks:
            self.storage.grow(step.num_blocks)
            self._views = [self._layout.view(pool) for pool in self.storage.pools]
            self.graphs.clear()
        prepare(step, self.storage, self.batch, self._parameters.set_row, self._extras, self._guided)
        if self.draft_model is not None:
            step = self.draft_model.guess(step)
        passes, guided = self._extras.of_step(step.rows), self._guided.of_step(step.rows)
        if any(row.drafts for row in step.rows):
            return self._run_with_drafts(step, passes, guided)
        if passes is not None:
            queued = self._launch_with_extras(step, passes, guided)
        else:
            only_generates = all(row.num_tokens == 1 and row.samples for row in step.rows)
            is_plain = not self.batch.brings_inputs(step.rows) and self.adapters.of_rows(self.batch, step.rows) is None
            if step.rows and only_generates and is_plain:
                slots, chosen = self._run_generation(step.rows, guided)
            else:
                slots, chosen = self._run_mixed(step.rows, guided)
            self.batch.count_tokens(slots)
            queued = QueuedStep(step.step_id, self._choice.begin_fetch(slots, chosen), guided=guided)
        self._guided_before = None if guided is None else queued
        return queued

    def _masked(self, logits: Tensor, guided: GuidedStep | None) -> Tensor:
        """logits [rows that sample, vocab] under the guides. The forward pass is queued: the device runs it while the host waits
        for the tokens of the step ahead and makes masks.
        """
        if guided is None:
            return logits
        if self._guided_before is not None:
            self._guided_before.settle()
        return guided.mask(logits)

    def _launch_with_extras(self, step: StepInput, passes: list[ExtraWork], guided: GuidedStep | None) -> QueuedStep:
        """Queue a step with rows that want more than tokens, or have a post-processor; it runs eagerly."""
        gathered = [self._run_with_extras(work)[1] for work in passes[:-1]]
        work = passes[-1]
        logits, rows = self._run_with_extras(work)
        logits = logits[work.sampling_rows].float()
        failed = work.process(logits, self.batch.token_ids, self.batch.num_tokens)
        logits = self._masked(logits, guided)
        slots, chosen = self._choose_and_append([row.slot for row in step.rows if row.samples], logits)
        self.batch.count_tokens(slots)
        return QueuedStep(step.step_id, self._choice.begin_fetch(slots, chosen), [*gathered, rows], failed, guided)

    def _run_with_drafts(self, step: StepInput, passes: list[ExtraWork] | None, guided: GuidedStep | None) -> Done:
        """Run a step with drafts in some rows, which may have all that others have."""
        rows, wanted = step.rows, [row.num_samples for row in step.rows]
        gathered, failed = list[FetchedRows](), list[tuple[int, str]]()
        if passes is None:
            hidden, flat = self._forward(rows, wanted)
            logits = self._model.logits(hidden[flat.logits_index])
        else:
            for work in passes:
                logits, fetched = self._run_with_extras(work)
                gathered.append(fetched)
            logits = logits[work.sampling_rows].float()
            failed = work.process(logits, self.batch.token_ids, self.batch.num_tokens)
        logits = self._masked(logits, guided)
        self._guided_before = None
        slots = [row.slot for row, count in zip(rows, wanted) for _ in range(count)]
        known = [self.batch.num_tokens[row.slot] + index for row, count in zip(rows, wanted) for index in range(count)]
        chosen, _ = self._choose(slots, known, logits)
        sampled, further = right_samples(rows, self._choice.begin_fetch(slots, chosen).wait())
        for samples in (sampled, *further.values()):
            for sample in samples:
                self.batch.append_tokens([sample])
        if guided is not None:
            failed += guided.accept(sampled, further)
            sampled = guided.told(sampled, further)
        debug_tensors = gathered[-1].wait_for_debug() if gathered else {}
        return Done(StepOutput(step.step_id, sampled, fetch_all(gathered), failed, debug_tensors, further))

    def _run_with_extras(self, work: ExtraWork) -> tuple[Tensor, FetchedRows]:
        """One pass: logits [sum of num_logits, vocab], and what clients want of it."""
        hidden, flat = self._forward(work.rows, work.num_logits)
        logits, outputs = hidden.new_empty(0, self._model.config.vocab_size), dict[str, Tensor]()
        if any(work.num_logits):
            logits, outputs = self._model.logits_and(work.outputs, hidden[flat.logits_index])
        return logits, work.gather(logits, outputs, self.batch)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run generation steps of padding only, in the smallest and the largest shape, to compile kernels and allocate memory."""
        for rows, tokens in ((1, 1), (self._pad_slot, self.batch.max_seq_len)):
            inputs = self._inputs_for(rows, tokens)
            self._choice.fill(inputs.numbers, [], [], self._pad_slot)
            inputs.send()
            for kind in Kind:
                for _ in range(2):  # the second run captures the graph
                    self._generation_step(inputs, kind)

    # ----------------------------------------------------------------------------------------------------- generation

    def _run_generation(self, rows: list[Row], guided: GuidedStep | None) -> tuple[list[SlotId], Chosen]:
        """Returns the rows' slots, and their tokens followed by those of padding rows."""
        numbers = self.batch.row_numbers(rows, [1] * len(rows))
        slots, num_tokens = numbers[:, 0].tolist(), (numbers[:, 1] + 1).tolist()
        inputs = self._inputs_for(len(rows), int(numbers[:, 1].max()) + 1)
        self._choice.fill(inputs.numbers, slots, num_tokens, self._pad_slot)
        inputs.tables[: len(rows)] = self.batch.block_tables[slots, : inputs.width]
        inputs.send()
        kind = self._choice.kind(slots, num_tokens)
        result = self._generation_step(inputs, kind)
        if kind is not Kind.SPECIAL:
            return slots, Chosen(result, None)
        here = inputs.device_numbers[:, : len(rows)]
        logits = self._masked(result[: len(rows)], guided)
        chosen = self._choice.choose_special(logits, here, slots, num_tokens, self.batch.token_ids)
        self._append(here, chosen.tokens)
        return slots, chosen

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
        self._append(inputs.device_numbers, tokens)
        return tokens

    # ---------------------------------------------------------------------------------------------------------- mixed

    def _run_mixed(self, rows: list[Row], guided: GuidedStep | None) -> tuple[list[SlotId], Chosen]:
        """Returns the slots that sample, and their tokens."""
        if not rows:
            return [], self._nothing
        hidden, flat = self._forward(rows, [int(row.samples) for row in rows])
        slots = [row.slot for row in rows if row.samples]
        if not slots:
            return [], self._nothing
        logits = self._masked(self._model.logits(hidden[flat.logits_index]), guided)
        return self._choose_and_append(slots, logits)

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
        hidden = self._model.forward(
            flat.token_ids, flat.positions, flat.cells, plans, self._views, flat.embedded, adapted
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

    def _choose_and_append(self, slots: list[SlotId], logits: Tensor) -> tuple[list[SlotId], Chosen]:
        """logits [slots, vocab] -> the slots and their tokens, which are appended to their ids."""
        if not slots:
            return [], self._nothing
        chosen, here = self._choose(slots, [self.batch.num_tokens[slot] for slot in slots], logits)
        self._append(here, chosen.tokens)
        return slots, chosen

    def _choose(self, slots: list[SlotId], num_tokens: list[int], logits: Tensor) -> tuple[Chosen, Tensor]:
        """logits [slots, vocab], behind `num_tokens` tokens of each slot -> their tokens, and the parameters [Number, slots]."""
        numbers = np.empty((len(Number), even(len(slots))), dtype=np.int64)
        self._choice.fill(numbers, slots, num_tokens, self._pad_slot)
        here = place(numbers, self._device)[:, : len(slots)]
        kind = self._choice.kind(slots, num_tokens)
        if kind is not Kind.SPECIAL:
            return Chosen(self._choice.choose(kind, logits, here), None), here
        return self._choice.choose_special(logits, here, slots, num_tokens, self.batch.token_ids), here

    def _append(self, numbers: Tensor, tokens: Tensor) -> None:
        """Append each token to its slot's ids. Padding rows, and slots at max_seq_len, write to the pad slot instead."""
        max_len, known = self.batch.max_seq_len, numbers[Number.KNOWN]
        place_of = torch.where(
            (known > 0) & (known < max_len), numbers[Number.SLOT] * max_len + known, self._pad_slot * max_len
        )
        self.batch.token_ids.view(-1).index_copy_(0, place_of, tokens)


class _Inputs:
    """The changing inputs of a generation step: numbers [Number, rows] int64 and block tables [rows, width] int32.

    The device buffer keeps its address. On the host there are NUM_BUFFERS pinned buffers, used in turn, so that one can be
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
        self._turn = 0
        self.device_numbers, self.device_tables = self._views(self._device)
        views = map(self._views, self._hosts)
        self._arrays = [(numbers.numpy(), tables.numpy()) for numbers, tables in views]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The host buffer's numbers; fill them before `send`."""
        return self._arrays[self._turn][0]

    @property
    def tables(self) -> NDArray[np.int32]:
        """The host buffer's block tables; fill them before `send`."""
        return self._arrays[self._turn][1]

    def send(self) -> None:
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        self._turn = (self._turn + 1) % NUM_BUFFERS

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        size = len(Number) * self._columns * 8
        numbers = buffer[:size].view(torch.int64).view(len(Number), self._columns)[:, : self.rows]
        return numbers, buffer[size:].view(torch.int32).view(self.rows, self.width)
