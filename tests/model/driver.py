"""Driver: hand-made steps for a real model runner. It plays the engine: hands out blocks, counts, takes samples in.

Blocks are handed out in a shuffled order, and the whole pool is filled with NaN first: a cell that is read before it
was written shows in the logits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig, Windows
from backend.api.sampling import SamplingConfig
from backend.core.step import NewRow, Row, SampledToken, StepInput
from backend.worker.group import InProcessWorkerGroup
from backend.worker.model_runner import ModelRunner
from tests.model.tiers import TORCH, TierCase


def poison(memory: Tensor) -> None:
    """Make every number in it NaN: float32, bfloat16, float16, and the scales of int8 KV alike."""
    memory.view(torch.uint8).fill_(255)


class Driver:
    def __init__(
        self,
        runner: ModelRunner,
        block_size: int,
        num_blocks: int = 100,
        seed: int = 0,
        window: int | None = None,
        sink_tokens: int = 0,
    ) -> None:
        """`window`: blocks that have left it are given back and become NaN, like any block of a new owner.

        Blocks with sink tokens are kept.
        """
        self.runner = runner
        self.block_size, self.num_blocks, self.window, self.sink_tokens = block_size, num_blocks, window, sink_tokens
        runner.storage.grow(num_blocks)
        for pool in runner.storage.pools:
            poison(pool)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self._new_rows: list[NewRow] = []
        self._copies: list[tuple[int, int]] = []

    def begin(
        self, slot: int, tokens: Sequence[int], computed: int = 0, table: Sequence[int] = (), adapter: str = ""
    ) -> None:
        """Put a sequence in a slot from the next step on. `table` holds the KV of its first `computed` tokens. `adapter`: the
        content of its LoRA adapter.
        """
        self.tokens[slot], self.computed[slot], self.tables[slot] = list(tokens), computed, list(table)
        row = NewRow(slot, list(tokens), len(tokens), 0, list(table), SamplingConfig(), adapter=adapter)
        self._new_rows.append(row)

    def copy(self, source: int) -> int:
        """A new block that holds what `source` holds, from the next step on."""
        self._copies.append((source, self.free[-1]))
        return self.free.pop()

    def make_step(self, chunks: Sequence[tuple[int, int]]) -> StepInput:
        """Makes one step of (slot, tokens) chunks; a row that reaches its end samples. Blocks are handed out for it."""
        rows = [self._row(slot, num_tokens) for slot, num_tokens in chunks]
        step = StepInput(0, rows, self._new_rows, self._copies, self.num_blocks)
        self._new_rows, self._copies = [], []
        return step

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[int, int]]) -> dict[int, Tensor]:
        """Run (slot, tokens) chunks as one step; a row that reaches its end samples. Returns logits [tokens, vocab]."""
        runner, step = self.runner, self.make_step(chunks)
        slots = [row.slot for row in step.rows if row.samples]
        runner.prepare(step)
        # First as the worker runs it; what it hands to the sampler stands for the last token's logits.
        before = [] if runner.states is None else [pool.clone() for pool in runner.states.pools]
        greedy, own = self._run(step, [int(row.samples) for row in step.rows])
        for pool, state in zip([] if runner.states is None else runner.states.pools, before, strict=True):
            pool.copy_(state)
        every = self._run(step, [num_tokens for _, num_tokens in chunks])[1].split([tokens for _, tokens in chunks])
        for index, part in enumerate([part for row, part in zip(step.rows, every) if row.samples]):
            part[-1] = own[index]
        samples = runner.sampler.sample(
            own, slots, runner.batch.token_ids, [len(self.tokens[slot]) for slot in slots], greedy
        )
        runner.batch.append_tokens(samples)
        self._finish(chunks, samples)
        return dict(zip((slot for slot, _ in chunks), every, strict=True))

    def run(self, slot: int, chunks: Sequence[int]) -> Tensor:
        """Run one slot's tokens in these chunks, each a step of its own. Returns the logits of all of them."""
        return torch.cat([self.step([(slot, num_tokens)])[slot] for num_tokens in chunks])

    def generate(self, slots: Sequence[int], num_tokens: int) -> dict[int, Tensor]:
        """Decode the slots together, one token a step. Returns their logits [num_tokens, vocab]."""
        steps = [self.step([(slot, 1) for slot in slots]) for _ in range(num_tokens)]
        return {slot: torch.cat([step[slot] for step in steps]) for slot in slots}

    def _run(self, step: StepInput, num_logits: list[int]) -> tuple[NDArray[np.int64] | None, Tensor | None]:
        runner = self.runner
        return runner.tier.run(
            runner.batch, step.rows, num_logits, runner.storage.pools, wants_logits=True, states=runner.states
        )

    def _row(self, slot: int, num_tokens: int) -> Row:
        end = self.computed[slot] + num_tokens
        new = [self.free.pop() for _ in range(-(-end // self.block_size) - len(self.tables[slot]))]
        self.tables[slot] += new
        return Row(slot, self.computed[slot], num_tokens, end == len(self.tokens[slot]), new)

    def _finish(self, chunks: Sequence[tuple[int, int]], samples: list[SampledToken]) -> None:
        for sample in samples:
            self.tokens[sample.slot].append(sample.token_id)
        for slot, num_tokens in chunks:
            self.computed[slot] += num_tokens
            self._let_go(slot)

    def _let_go(self, slot: int) -> None:
        """The token at position `computed` sees positions from computed - window + 1 on."""
        gone = 0 if self.window is None else max(0, self.computed[slot] - self.window + 1) // self.block_size
        for index in range(-(-self.sink_tokens // self.block_size), gone):
            block = self.tables[slot][index]
            if block >= 0:
                for pool in self.runner.storage.pools:
                    poison(pool[block])
                self.tables[slot][index] = -1
                self.free.insert(0, block)


class GroupDriver(Driver):
    """Over a whole worker group; `info` is what it told of its model."""

    def __init__(self, group: InProcessWorkerGroup, block_size: int, num_blocks: int = 100, **options: object) -> None:
        self.group, self.info = group, group.load()
        group.initialize_kv_cache(num_blocks, block_size, num_blocks)
        super().__init__(group.runner, block_size, num_blocks, **options)

    def execute(self, chunks: Sequence[tuple[int, int]]) -> list[SampledToken]:
        """Run chunks as the engine does, without looking at logits. Returns what was sampled."""
        samples = self.group.execute(self.make_step(chunks)).sampled
        self._finish(chunks, samples)
        return samples

    @classmethod
    def of(
        cls,
        directory: Path,
        tier: TierCase = TORCH,
        dtype: str = "float32",
        block_size: int | None = None,
        max_attention_window: Windows | None = None,
        sink_tokens: int = 0,
        **options: object,
    ) -> GroupDriver:
        attention = dict(max_attention_window=max_attention_window, sink_tokens=sink_tokens)
        group = make_group(directory, tier, block_size, dtype=dtype, **attention)
        return cls(group, block_size or tier.block, sink_tokens=sink_tokens, **options)


def make_group(
    directory: Path,
    tier: TierCase,
    block_size: int | None = None,
    max_batch_size: int = 8,
    max_num_tokens: int = 1024,
    max_attention_window: Windows | None = None,
    sink_tokens: int = 0,
    **fields: object,
) -> InProcessWorkerGroup:
    """A worker group on one thread of the CPU. `fields`: those of the model's section."""
    section = ModelConfigSection(path=str(directory), kernels=tier.kernels, num_threads=1, device="cpu", **fields)
    scheduler = SchedulerConfig(max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)
    kv_cache = KvCacheConfig(
        block_size=block_size or tier.block, max_attention_window=max_attention_window, sink_tokens=sink_tokens
    )
    return InProcessWorkerGroup(section, scheduler, kv_cache)
