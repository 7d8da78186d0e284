"""ModelRunner: one step on one rank.

Effects in order: grow, copy blocks, take in new rows, append blocks, forward, sample, append.

`forward` and `sample` are apart, so that logits can be looked at between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.api.sampling import SamplingConfig
from backend.core.step import BlockId, NewRow, Row, SampledToken, SlotId, StepInput, StepOutput
from backend.models.llama import Llama
from backend.sampling.sampler import Sampler
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage


class ModelRunner:
    def __init__(self, model: Llama, storage: KVStorage, batch: InputBatch, sampler: Sampler):
        self.model = model
        self.storage = storage
        self.batch = batch
        self.sampler = sampler

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        rows, logits = self.forward(step)
        return StepOutput(step.step_id, self.sample(rows, logits))

    @torch.inference_mode()
    def forward(self, step: StepInput) -> tuple[list[Row], Tensor]:
        """Everything up to the logits. Returns the rows that sample and their logits [num_rows, vocab] float32."""
        self.storage.grow(step.num_blocks)
        self.storage.copy_blocks(step.copies)
        self.batch.take_in(step.new_rows)
        for new_row in step.new_rows:
            self.sampler.set_row(new_row)
        for row in step.rows:
            if row.new_block_ids:
                self.batch.append_blocks(row.slot, row.new_block_ids)
        if not step.rows:
            return [], torch.empty(0, self.model.config.vocab_size)
        flat = self.batch.flatten(step.rows)
        hidden = self.model.forward(flat.token_ids, flat.positions, flat.cells, flat.rows, self.storage.pools)
        return flat.sample_rows, self.model.logits(hidden[flat.sample_index])

    @torch.inference_mode()
    def sample(self, rows: list[Row], logits: Tensor) -> list[SampledToken]:
        """Choose a token for each row, and append it to the row's slot."""
        if not rows:
            return []
        slots = [row.slot for row in rows]
        num_tokens = [self.batch.num_tokens[slot] for slot in slots]
        samples = self.sampler.sample(logits, slots, self.batch.token_ids, num_tokens)
        self.batch.append_tokens(samples)
        return samples


def full_step(num_slots: int, max_num_tokens: int, max_seq_len: int, block_size: int) -> StepInput:
    """The step that needs the most memory: every slot samples, one row has all tokens the others leave it."""
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
