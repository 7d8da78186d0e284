"""Driver: hand-made steps for the real worker group. It plays the engine: hands out blocks, counts, takes samples in.

Blocks are handed out in a shuffled order, and the whole pool is filled with NaN first: a cell that is read before it
was written shows in the logits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from backend.api.config import ModelConfigSection, SchedulerConfig
from backend.api.sampling import SamplingConfig
from backend.core.step import NewRow, Row, SampledToken, StepInput
from backend.models.llama import Llama
from backend.worker.group import InProcessWorkerGroup


class SpyModel:
    """Passes everything on, and keeps the hidden states and the number of tokens of each forward."""

    def __init__(self, model: Llama):
        self._model = model
        self.config = model.config
        self.num_tokens: list[int] = []

    def forward(self, token_ids: Tensor, *others: object) -> Tensor:
        self.num_tokens.append(len(token_ids))
        self.hidden = self._model.forward(token_ids, *others)
        return self.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


class Driver:
    def __init__(
        self,
        group: InProcessWorkerGroup,
        block_size: int = 4,
        num_blocks: int = 400,
        seed: int = 0,
        window: int | None = None,
    ):
        """`window`: blocks that have left it are given back and become NaN, like any block of a new owner."""
        self.group = group
        self.info = group.load()
        group.initialize_kv_cache(num_blocks, block_size, num_blocks)
        self.runner = group.runner
        self.spy = self.runner.model = SpyModel(group.model)
        for pool in self.runner.storage.pools:
            pool.fill_(torch.nan)
        self.block_size, self.num_blocks, self.window = block_size, num_blocks, window
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self._new_rows: list[NewRow] = []
        self._copies: list[tuple[int, int]] = []

    @classmethod
    def of(cls, directory: Path, dtype: str = "float32", **options: object) -> Driver:
        section = ModelConfigSection(path=str(directory), dtype=dtype, num_threads=1, device="cpu")
        return cls(InProcessWorkerGroup(section, SchedulerConfig(max_batch_size=8, max_num_tokens=1024)), **options)

    def begin(self, slot: int, tokens: Sequence[int], computed: int = 0, table: Sequence[int] = ()) -> None:
        """Put a sequence in a slot from the next step on. `table` holds the KV of its first `computed` tokens."""
        self.tokens[slot], self.computed[slot], self.tables[slot] = list(tokens), computed, list(table)
        self._new_rows.append(NewRow(slot, list(tokens), len(tokens), 0, list(table), SamplingConfig()))

    def copy(self, source: int) -> int:
        """A new block that holds what `source` holds, from the next step on."""
        self._copies.append((source, self.free[-1]))
        return self.free.pop()

    def step(self, chunks: Sequence[tuple[int, int]]) -> dict[int, Tensor]:
        """Run (slot, tokens) chunks as one step; a row that reaches its end samples. Returns logits [tokens, vocab]."""
        rows = [self._row(slot, num_tokens) for slot, num_tokens in chunks]
        step = StepInput(0, rows, self._new_rows, self._copies, self.num_blocks)
        self._new_rows, self._copies = [], []
        with torch.inference_mode():
            sampling, logits = self.runner.forward(step)
            every = self.spy.logits(self.spy.hidden).split([num_tokens for _, num_tokens in chunks])
            own = iter(logits)  # what the worker itself hands to the sampler stands for the last token's
            for row, part in zip(rows, every, strict=True):
                if row.samples:
                    part[-1] = next(own)
            assert next(own, None) is None
            assert [row.slot for row in sampling] == [row.slot for row in rows if row.samples]
            self._take_in(self.runner.sample(sampling, logits))
        for slot, num_tokens in chunks:
            self.computed[slot] += num_tokens
            self._let_go(slot)
        return dict(zip((slot for slot, _ in chunks), every, strict=True))

    def run(self, slot: int, chunks: Sequence[int]) -> Tensor:
        """Run one slot's tokens in these chunks, each a step of its own. Returns the logits of all of them."""
        return torch.cat([self.step([(slot, num_tokens)])[slot] for num_tokens in chunks])

    def generate(self, slots: Sequence[int], num_tokens: int) -> dict[int, Tensor]:
        """Decode the slots together, one token a step. Returns their logits [num_tokens, vocab]."""
        steps = [self.step([(slot, 1) for slot in slots]) for _ in range(num_tokens)]
        return {slot: torch.cat([step[slot] for step in steps]) for slot in slots}

    def _row(self, slot: int, num_tokens: int) -> Row:
        end = self.computed[slot] + num_tokens
        new = [self.free.pop() for _ in range(-(-end // self.block_size) - len(self.tables[slot]))]
        self.tables[slot] += new
        return Row(slot, self.computed[slot], num_tokens, end == len(self.tokens[slot]), new)

    def _take_in(self, samples: list[SampledToken]) -> None:
        for sample in samples:
            self.tokens[sample.slot].append(sample.token_id)

    def _let_go(self, slot: int) -> None:
        """The token at position `computed` sees positions from computed - window + 1 on."""
        gone = 0 if self.window is None else max(0, self.computed[slot] - self.window + 1) // self.block_size
        for index in range(gone):
            block = self.tables[slot][index]
            if block >= 0:
                for pool in self.runner.storage.pools:
                    pool[block] = torch.nan
                self.tables[slot][index] = -1
                self.free.insert(0, block)
