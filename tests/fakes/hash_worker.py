"""A WorkerGroup without a model: a shadow of the KV.

Each KV cell holds a chained hash of (token, position, namespace, the cell before it), written and read through the block
table only. The next token is a hash of the cells in reach, so a stale, foreign or missing cell changes the output. `oracle`
computes the same output from the token ids alone, with an infinite pool.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Sequence

from backend.api.guide import NOT_SET_UP
from backend.api.lora import LoraConfig
from backend.core.step import (
    Guides,
    MemoryUse,
    ModelInfo,
    NewRow,
    PreparedAdapter,
    Row,
    SampledToken,
    SlotId,
    StepInput,
    StepOutput,
)

MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 64-bit hash of integers (splitmix64's finaliser over a running sum)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state * 0xBF58476D1CE4E5B9 + value + 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def seed_of(namespace: str) -> int:
    return mix(*namespace.encode())


def in_reach(cells: Sequence[int], window: int | None, sink_tokens: int = 0) -> list[int]:
    """Of all cells so far those that the next token depends on: the window's, and in front those of sink tokens."""
    first = max(0, len(cells) - window) if window else 0
    return [*cells[: min(sink_tokens, first)], *cells[first:]]


def next_token(cells: Sequence[int], seed: int, counter: int, vocab_size: int) -> int:
    return mix(sum(mix(i, cell) for i, cell in enumerate(reversed(cells))), seed, counter) % vocab_size


def top_tokens(cells: Sequence[int], counter: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The `count` most likely next tokens, each with its log-probability, the best first. More of them begin with the same."""
    state = mix(sum(mix(i, cell) for i, cell in enumerate(reversed(cells))), counter)
    found: dict[int, float] = {}
    index = 0
    while len(found) < min(count, vocab_size):
        drawn = mix(state, index)
        found.setdefault(drawn % vocab_size, -0.1 * (len(found) + 1) - (drawn >> 40) % 1000 / 12_000)
        index += 1
    return list(found.items())


def cells_of(token_ids: Sequence[int], namespace: str = "") -> list[int]:
    """The KV of a sequence."""
    cells, before = [], 0
    for position, token_id in enumerate(token_ids):
        before = cell_of(before, token_id, position, seed_of(namespace))
        cells.append(before)
    return cells


def cell_of(before: int, token_id: int, position: int, namespace: int) -> int:
    return mix(before, token_id, position, namespace)


def oracle(
    token_ids: list[int],
    num_outputs: int,
    vocab_size: int,
    namespace: str = "",
    seed: int = 0,
    counter: int = 0,
    window: int | None = None,
    sink_tokens: int = 0,
) -> list[int]:
    """The outputs that follow `token_ids` when nothing is ever evicted."""
    cells, before, outputs = [], 0, []
    ids = list(token_ids)
    for step in range(num_outputs):
        for position in range(len(cells), len(ids)):
            before = cell_of(before, ids[position], position, seed_of(namespace))
            cells.append(before)
        token = next_token(in_reach(cells, window, sink_tokens), seed, counter + step, vocab_size)
        outputs.append(token)
        ids.append(token)
    return outputs


class GivenCells:
    """The cells of all blocks in memory that the engine has given."""

    def __init__(self, memory: memoryview, block_size: int) -> None:
        self._cells, self._size = memory.cast("Q"), block_size

    def __getitem__(self, block: int) -> memoryview:
        return self._cells[block * self._size : (block + 1) * self._size]

    def __setitem__(self, block: int, cells: list[int]) -> None:
        self[block][:] = array("Q", cells)


class HashWorkerGroup:
    """Implements WorkerGroup. `trace` keeps every StepInput for tests that look at the schedule."""

    def __init__(
        self,
        vocab_size: int = 1000,
        max_seq_len: int = 1 << 20,
        window: int | None = None,
        free_bytes: int = 1 << 30,
        bytes_per_token: int = 1024,
        keep_trace: bool = True,
        takes_extra_inputs: bool = False,
        looks_ahead: bool = False,
        sink_tokens: int = 0,
        eos_ids: tuple[int, ...] = (),
        guides: Guides | None = None,
        takes_drafts: bool = True,
        kv_block_size: int = 4,
        is_recurrent: bool = False,
    ) -> None:
        """`guides`: they are refused without; the tokens are what they are in any case. `kv_block_size`: tokens of a block.

        `is_recurrent`: a cell follows from the state of its sequence, not from the cell before it.
        """
        self.guides, self.images = guides, None
        self.info = ModelInfo(
            "hash",
            vocab_size,
            max_seq_len,
            window,
            bytes_per_token,
            takes_extra_inputs=takes_extra_inputs,
            looks_ahead=looks_ahead,
            eos_ids=eos_ids,
            guide_refusal=NOT_SET_UP if guides is None else "",
            takes_drafts=takes_drafts,
            kv_fingerprint="" if is_recurrent else "hash",
            kv_block_bytes=8 * kv_block_size,
            kv_layers=0 if is_recurrent else 1,
            state_bytes=1 if is_recurrent else 0,
        )
        self._states: dict[int, int] = {}  # by number: those of slots, then snapshots
        self.sink_tokens = sink_tokens
        self._in_flight: deque[StepOutput | Exception] = deque()
        self.free_bytes = free_bytes
        self.trace: list[StepInput] = []
        self.fail_next: Exception | None = None
        self.num_backed = 0
        self.num_grown = 0  # how often memory was obtained
        self._keep_trace = keep_trace
        self._slots: dict[int, NewRow] = {}
        self.host: dict[int, list[int]] = {}  # place -> swapped KV
        self.adapters: dict[str, PreparedAdapter] = {}  # those on the device

    @property
    def num_in_flight(self) -> int:
        """The number of steps that were submitted and not collected."""
        return len(self._in_flight)

    def load(self) -> ModelInfo:
        return self.info

    def prepare_adapter(self, lora: LoraConfig) -> PreparedAdapter:
        """An adapter of 10 bytes whose content is its path."""
        return PreparedAdapter(lora.path, 8, 10, 10, None)

    def free_memory_bytes(self) -> int:
        return self.free_bytes

    def check(self) -> None:
        """It has no processes."""

    def memory_use(self) -> MemoryUse:
        return MemoryUse()

    def initialize_kv_cache(
        self,
        max_blocks: int,
        block_size: int,
        num_blocks: int,
        layers: Sequence[memoryview] | None = None,
        num_snapshots: int = 0,
    ) -> None:
        self.max_blocks, self.block_size = max_blocks, block_size
        self.cells: list[list[int]] | GivenCells = []
        if layers is not None:
            assert len(layers[0]) == 8 * block_size * max_blocks, "kv_block_size is not that of the configuration"
            self.cells, self.num_backed = GivenCells(layers[0], block_size), max_blocks
        self._grow(num_blocks)

    def execute(self, step: StepInput) -> StepOutput:
        self.submit(step)
        return self.collect()

    def submit(self, step: StepInput) -> None:
        """Runs it at once, as a device would that takes steps in order; its failure is found out when it is collected."""
        assert len(self._in_flight) <= self.info.looks_ahead, "too many steps in flight"
        if self._keep_trace:
            self.trace.append(step)
        if self._in_flight and isinstance(self._in_flight[0], Exception):
            return  # lost with the one ahead of it
        try:
            self._in_flight.append(self._execute(step))
        except RuntimeError as error:
            self._in_flight.append(error)

    def collect(self) -> StepOutput:
        output = self._in_flight.popleft()
        if isinstance(output, Exception):
            self._in_flight.clear()
            raise output
        return output

    def _execute(self, step: StepInput) -> StepOutput:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            for block in range(self.num_backed):
                self.cells[block] = [mix(i) for i in range(self.block_size)]
            self._states = {}
            raise error
        for content in step.adapters_out:
            self.adapters.pop(content, None)
        self.adapters |= {adapter.content: adapter for adapter in step.adapters_in}
        for block, place in step.swap_out:
            self.host[place] = list(self.cells[block])
        self._grow(step.num_blocks)
        for block, place in step.swap_in:
            self.cells[block] = list(self.host[place])
        for source, destination in step.copies:
            self.cells[destination] = list(self.cells[source])
        copied = [(destination, self._states[source]) for source, destination in step.state_copies]
        self._states.update(copied)
        for row in step.new_rows:
            self._slots[row.slot] = NewRow(**{name: getattr(row, name) for name in NewRow.__struct_fields__})
        further: dict[SlotId, list[SampledToken]] = {}
        sampled = [sample for row in step.rows if (sample := self._run_with_drafts(row, further)) is not None]
        return StepOutput(step.step_id, sampled, further=further)

    def read_blocks(self, block_ids: list[int]) -> bytes:
        return b"".join(struct.pack(f"<{self.block_size}Q", *self.cells[block]) for block in block_ids)

    def write_blocks(self, block_ids: list[int], data: bytes, num_blocks: int) -> None:
        self._grow(num_blocks)
        assert len(data) == 8 * self.block_size * len(block_ids)
        for block, cells in zip(block_ids, struct.iter_unpack(f"<{self.block_size}Q", data)):
            self.cells[block] = list(cells)

    def shutdown(self) -> None:
        self._slots.clear()

    def _grow(self, num_blocks: int) -> None:
        if num_blocks > self.num_backed:
            self.num_grown += 1
            self.cells += [[mix(7, i) for i in range(self.block_size)] for _ in range(num_blocks - self.num_backed)]
            self.num_backed = num_blocks

    def _run_with_drafts(self, row: Row, further: dict[SlotId, list[SampledToken]]) -> SampledToken | None:
        """Drafts are run one by one, as if they were known, also those behind a wrong one: they leave their mark in the KV.

        Its draft model guesses a multiple of four wrong, and all else right.
        """
        num_drafts = len(row.drafts) + row.num_guesses
        num_known = row.num_tokens - num_drafts
        assert all(row.num_computed < at <= row.num_computed + num_known for at, _ in row.saves), (
            "keeps a draft's state"
        )
        first = self._run(Row(row.slot, row.num_computed, num_known, row.samples, row.new_block_ids, saves=row.saves))
        if not num_drafts:
            return first
        before_drafts = self._states.get(row.slot)
        assert first is not None, "drafts for a row that samples nothing"
        token_ids, newest, is_right, right = self._slots[row.slot].token_ids, first, True, []
        for index in range(num_drafts):
            guess = newest.token_id + (newest.token_id % 4 == 0)
            draft = row.drafts[index] if row.drafts else guess
            is_right &= newest.token_id == draft
            token_ids[-1] = draft
            following = self._run(Row(row.slot, row.num_computed + num_known + index, 1, True))
            assert following is not None  # it samples
            newest = following
            if is_right:
                right.append(newest)
        if before_drafts is not None:
            self._states[row.slot] = before_drafts
        del token_ids[-1 - num_drafts :]
        token_ids += [sample.token_id for sample in (first, *right)]
        if right:
            further[row.slot] = right
        return first

    def _run(self, row: Row) -> SampledToken | None:
        state = self._slots[row.slot]
        assert not state.adapter or state.adapter in self.adapters, "runs with an adapter that is not on the device"
        state.block_ids.extend(row.new_block_ids)
        namespace = seed_of(state.cache_namespace)
        end = row.num_computed + row.num_tokens
        assert end <= len(state.token_ids), "asked to run tokens that are not known"
        for position in range(row.num_computed, end):
            before = self._before(state, position) if position else 0
            block, offset = divmod(position, self.block_size)
            assert state.block_ids[block] >= 0, "writes into a block that has left the window"
            cell = cell_of(before, state.token_ids[position], position, namespace)
            self.cells[state.block_ids[block]][offset] = cell
            if self.info.state_bytes:
                self._states[row.slot] = cell
                self._states.update((number, cell) for at, number in row.saves if at == position + 1)
        if not row.samples:
            return None
        assert end == len(state.token_ids), "samples before the whole context is computed"
        cells = self._cells(state, end)
        counter = state.num_sampled_before + end - state.num_prompt_tokens
        if state.top_log_probs:
            top = top_tokens(cells, counter, state.top_log_probs, self.info.vocab_size)
            state.token_ids.append(top[0][0])
            return SampledToken(row.slot, top[0][0], None, top)
        token = next_token(cells, state.sampling.seed or 0, counter, self.info.vocab_size)
        state.token_ids.append(token)
        return SampledToken(row.slot, token, float(token) if state.return_log_probs else None)

    def _before(self, state: NewRow, position: int) -> int:
        """What a cell follows from, besides its token."""
        return self._states[state.slot] if self.info.state_bytes else self._read(state, position - 1)

    def _cells(self, state: NewRow, end: int) -> list[int]:
        """What the token behind position `end` - 1 depends on."""
        positions = in_reach(range(end), self.info.sliding_window, self.sink_tokens)
        return [self._read(state, position) for position in positions]

    def _read(self, state: NewRow, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        assert state.block_ids[block] >= 0, "reads a block that has left the window"
        return self.cells[state.block_ids[block]][offset]
