"""ModelRunner: runs one step on one rank.

Effects in order: release and upload adapters, grow the KV pool, copy blocks, store new rows, append blocks, run the draft model,
run the model, sample, append the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.sampling import SamplingConfig
from backend.core.step import BlockId, NewRow, Row, SampledToken, SlotId, StepInput, StepOutput
from backend.sampling.sampler import Sampler
from backend.worker.draft_model import DraftModel
from backend.worker.extras import Extras, ExtraWork, FetchedRows, fetch_all
from backend.worker.guided_rows import GuidedRows, GuidedStep
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.tier import Tier


class Pending(Protocol):
    """A step in flight."""

    def wait(self) -> StepOutput: ...


class Done(NamedTuple):
    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class ModelRunner:
    def __init__(
        self,
        tier: Tier,
        storage: KVStorage,
        batch: InputBatch,
        sampler: Sampler,
        extras: Extras | None = None,
        guided: GuidedRows | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.tier = tier
        self.storage = storage
        self.batch = batch
        self.sampler = sampler
        self.extras = extras or Extras()
        self.guided = guided or GuidedRows(None, 0, 0)
        self.draft_model = draft_model

    def launch(self, step: StepInput) -> Done:
        """Run a step to its end."""
        return Done(self.execute(step))

    def execute(self, step: StepInput) -> StepOutput:
        self.prepare(step)
        if self.draft_model is not None:
            step = self.draft_model.guess(step)
        if not step.rows:
            return StepOutput(step.step_id, [])
        slots = [row.slot for row in step.rows for _ in range(row.num_samples)]
        # A row that samples runs all of its known tokens in this step, so the next one is its number `num_tokens`. What is
        # sampled behind its drafts counts them as known.
        num_tokens = [self.batch.num_tokens[row.slot] + index for row in step.rows for index in range(row.num_samples)]
        passes, guided = self.extras.of_step(step.rows), self.guided.of_step(step.rows)
        if passes is not None:
            return self._execute_with_extras(step, passes, guided, slots, num_tokens)
        num_logits = [row.num_samples for row in step.rows]
        needed = self.sampler.needs_logits(slots, num_tokens)
        greedy, logits = self.tier.run(self.batch, step.rows, num_logits, self.storage.pools, any(needed))
        if guided is not None and logits is not None:
            logits = guided.mask(logits)
        samples = self.sampler.sample(logits, slots, self.batch.token_ids, num_tokens, greedy, needed)
        sampled, further = self._append(step.rows, samples)
        if guided is not None:
            failed = guided.accept(sampled, further)
            return StepOutput(step.step_id, guided.told(sampled, further), failed=failed, further=further)
        return StepOutput(step.step_id, sampled, further=further)

    def _execute_with_extras(
        self,
        step: StepInput,
        passes: list[ExtraWork],
        guided: GuidedStep | None,
        slots: list[SlotId],
        num_tokens: list[int],
    ) -> StepOutput:
        """Like the rest of `execute`, for a step with rows that want more than tokens or have a post-processor."""
        gathered = [self._run(work, False)[2] for work in passes[:-1]]
        work = passes[-1]
        needed = [
            is_needed or slot in work.processed
            for slot, is_needed in zip(slots, self.sampler.needs_logits(slots, num_tokens))
        ]
        greedy, logits, rows = self._run(work, any(needed))
        sampling = work.sampling_rows
        greedy = None if greedy is None else greedy[sampling]
        logits = None if logits is None else logits[sampling]
        failed = [] if logits is None else work.process(logits, self.batch.token_ids, self.batch.num_tokens)
        if guided is not None and logits is not None:
            logits = guided.mask(logits)
        samples = self.sampler.sample(logits, slots, self.batch.token_ids, num_tokens, greedy, needed)
        sampled, further = self._append(step.rows, samples)
        if guided is not None:
            failed = [*failed, *guided.accept(sampled, further)]
            sampled = guided.told(sampled, further)
        return StepOutput(step.step_id, sampled, fetch_all([*gathered, rows]), failed, rows.wait_for_debug(), further)

    def _append(
        self, rows: list[Row], samples: list[SampledToken]
    ) -> tuple[list[SampledToken], dict[SlotId, list[SampledToken]]]:
        """Append what stands behind right tokens only. Returns StepOutput's `sampled` and `further`."""
        sampled, further = right_samples(rows, samples)
        self.batch.append_tokens(sampled)
        for run in further.values():
            for sample in run:
                self.batch.append_tokens([sample])
        return sampled, further

    def _run(self, work: ExtraWork, needs_logits: bool) -> tuple[NDArray[np.int64] | None, Tensor | None, FetchedRows]:
        """One pass: what the tier gives, and what clients want of it."""
        outputs = dict.fromkeys(work.outputs, torch.empty(0))
        greedy, logits = self.tier.run(
            self.batch, work.rows, work.num_logits, self.storage.pools, work.wants_logits or needs_logits, outputs
        )
        return greedy, logits, work.gather(logits, outputs, self.batch)

    def prepare(self, step: StepInput) -> None:
        """Bring adapters, KV storage, slots and sampling parameters up to date, before the model runs."""
        self.tier.adapters.update(step)
        prepare(step, self.storage, self.batch, self.sampler.set_row, self.extras, self.guided)


def prepare(
    step: StepInput,
    storage: KVStorage,
    batch: InputBatch,
    set_row: Callable[[NewRow], None],
    extras: Extras,
    guided: GuidedRows,
) -> None:
    """Grow the KV pool, copy blocks, store new rows, append blocks."""
    storage.grow(step.num_blocks)
    storage.copy_blocks(step.copies)
    batch.take_in(step.new_rows)
    for new_row in step.new_rows:
        set_row(new_row)
        extras.set_row(new_row)
        guided.set_row(new_row)
    for row in step.rows:
        if row.new_block_ids:
            batch.append_blocks(row.slot, row.new_block_ids)
        if row.drafts:
            batch.put_drafts(row)


def right_samples(
    rows: list[Row], samples: list[SampledToken]
) -> tuple[list[SampledToken], dict[SlotId, list[SampledToken]]]:
    """Of what was sampled behind the newest token and each draft of the rows: the first of each row, and those that follow it
    because every draft ahead of them is what was sampled in its place.
    """
    if len(samples) == sum(row.samples for row in rows):
        return samples, {}
    sampled, further, start = [], {}, 0
    for row in rows:
        mine = samples[start : start + row.num_samples]
        start += len(mine)
        sampled += mine[:1]
        num_right = 0
        while num_right < len(row.drafts) and mine[num_right].token_id == row.drafts[num_right]:
            num_right += 1
        if num_right:
            further[row.slot] = mine[1 : 1 + num_right]
    return sampled, further


def full_step(num_slots: int, max_num_tokens: int, max_seq_len: int, block_size: int) -> StepInput:
    """The step that needs the most memory: every slot samples, and the first ones have as many tokens as fit."""
    new_rows: list[NewRow] = []
    left, num_blocks = max_num_tokens, 0
    for slot in range(num_slots):
        num_tokens = min(max_seq_len, left - (num_slots - 1 - slot))
        blocks = [BlockId(num_blocks + index) for index in range(-(-num_tokens // block_size))]
        sampling = SamplingConfig(temperature=1.0, top_p=0.9, repetition_penalty=1.1)
        new_rows.append(NewRow(SlotId(slot), [0] * num_tokens, num_tokens, 0, blocks, sampling, return_log_probs=True))
        left, num_blocks = left - num_tokens, num_blocks + len(blocks)
    rows = [Row(row.slot, 0, len(row.token_ids), True) for row in new_rows]
    return StepInput(0, rows, new_rows, num_blocks=num_blocks)
