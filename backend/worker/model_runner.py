"""ModelRunner: runs each step to its end, with a tier that computes on the host or layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.sampling import SamplingConfig
from backend.core.step import BlockId, NewRow, Row, SlotId, StepInput, StepOutput
from backend.sampling.sampler import Sampler
from backend.worker.draft_model import DraftModel
from backend.worker.extra_outputs import ExtraOutputs, FetchedRows, Pass
from backend.worker.guided_rows import GuidedRows
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.pipeline import Done, Runner, output_of, samples_of
from backend.worker.post_processors import Failure
from backend.worker.state_storage import StateStorage
from backend.worker.tier import Tier

_NOT_RUN = torch.empty(0)  # stands for an output until the tier has computed it


class ModelRunner(Runner):
    def __init__(
        self,
        tier: Tier,
        storage: KVStorage,
        batch: InputBatch,
        sampler: Sampler,
        extras: ExtraOutputs | None = None,
        guided: GuidedRows | None = None,
        draft_model: DraftModel | None = None,
        states: StateStorage | None = None,
    ) -> None:
        super().__init__(storage, batch, tier.adapters, sampler.set_row, extras, guided, draft_model, states)
        self.tier, self.sampler = tier, sampler

    def launch(self, step: StepInput) -> Done:
        """Run a step to its end."""
        return Done(self.execute(step))

    def execute(self, step: StepInput) -> StepOutput:
        """Run the stages of pipeline.py. Raises IndexError when a row names a token or a block that its slot does not have."""
        step = self.prepare(step)
        if not step.rows:
            return StepOutput(step.step_id, [])
        passes, guided = self.extras.of_step(step.rows), self.guided.of_step(step.rows)
        slots, num_tokens, has_drafts = samples_of(step.rows, self.batch.num_tokens)
        needed = passes[-1].needed(slots, self.sampler.needs_logits(slots, num_tokens))
        greedy, logits, gathered = self._forward(passes, any(needed))
        failed: list[Failure] = []
        if logits is not None:
            failed = passes[-1].process(logits, self.batch.token_ids, self.batch.num_tokens)
            logits = guided.mask(logits)
        samples = self.sampler.sample(logits, slots, self.batch.token_ids, num_tokens, greedy, needed)
        output = output_of(step, samples, has_drafts, guided, gathered, failed)
        self._append(output)
        return output

    def _forward(
        self, passes: Sequence[Pass], needs_logits: bool
    ) -> tuple[NDArray[np.int64] | None, Tensor | None, list[FetchedRows]]:
        """Run all passes. Returns the most likely token and the logits of each sample, as Tier.run does, and gathered rows."""
        gathered: list[FetchedRows] = []
        for each in passes:
            outputs = dict.fromkeys(each.outputs, _NOT_RUN)
            needs = each.wants_logits or (needs_logits and each is passes[-1])
            memory = self.storage.pools, needs, outputs, self.states
            greedy, logits = self.tier.run(self.batch, each.rows, each.num_logits, *memory)
            gathered += each.gather(logits, outputs, self.batch)
        return passes[-1].sampled(greedy), passes[-1].sampled(logits), gathered


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
