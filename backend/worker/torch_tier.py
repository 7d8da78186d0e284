"""TorchTier: the model by torch operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.core.step import Row
from backend.models.llama import Llama
from backend.worker.input_batch import InputBatch
from backend.worker.tier import KVBlock


class TorchTier:
    name = "torch"

    def __init__(self, model: Llama, block_size: int):
        self._model = model
        self._block_size = block_size

    def kv_block(self) -> KVBlock:
        """See kernels/kv_write.py."""
        config = self._model.config
        return KVBlock((self._block_size, 2, config.num_kv_heads, config.head_dim), self._model.embedding.dtype)

    def run(
        self, batch: InputBatch, rows: list[Row], num_logits: Sequence[int], pools: list[Tensor], wants_logits: bool
    ) -> tuple[None, Tensor]:
        """Logits are always computed: the sampler finds the greatest."""
        flat = batch.flatten(rows, num_logits)
        hidden = self._model.forward(flat.token_ids, flat.positions, flat.cells, flat.rows, pools)
        if len(flat.logits_index) == 0:
            return None, torch.empty(0, self._model.config.vocab_size)
        return None, self._model.logits(hidden[flat.logits_index])
