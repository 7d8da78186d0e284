"""TorchTier: runs the model layer by layer, with torch operators on a CPU and Triton kernels on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.core.step import Row
from backend.models.decoder import Decoder, StepStates
from backend.worker.input_batch import InputBatch
from backend.worker.state_storage import StateStorage
from backend.worker.tier import KVBlock
from backend.worker.token_adapters import TorchAdapters
from kernels.common.kv_format import PoolLayout
from kernels.paged_attention import plan_attention


class TorchTier:
    name = "torch"

    def __init__(self, model: Decoder, layout: PoolLayout) -> None:
        self._model = model
        self._layout = layout
        self.adapters = TorchAdapters(model.device)

    def kv_block(self) -> KVBlock:
        return KVBlock(self._layout.block_shape, self._layout.dtype)

    @torch.inference_mode()
    def run(
        self,
        batch: InputBatch,
        rows: list[Row],
        num_logits: Sequence[int],
        pools: list[Tensor],
        wants_logits: bool,
        outputs: dict[str, Tensor] | None = None,
        states: StateStorage | None = None,
    ) -> tuple[None, Tensor]:
        """See Tier.run. Logits are always computed, and the most likely tokens never: the sampler finds them."""
        model, config = self._model, self._model.config
        flat = batch.flatten(rows, num_logits)
        device, dtype = model.device, model.dtype
        plans = plan_attention(
            flat.rows,
            self._layout.block_size,
            config.windows,
            config.head_dim,
            dtype,
            device,
            sink_tokens=config.sink_tokens,
        )
        views = [self._layout.view(pool) for pool in pools]
        adapted = self.adapters.of_tokens(batch, rows)
        own = None if states is None else StepStates(states.pools, states.rows(rows))
        hidden = model.forward(
            flat.token_ids, flat.positions, flat.cells, plans, views, flat.embedded, adapted, own, flat.tables
        )
        if len(flat.logits_index) == 0:
            return None, torch.empty(0, config.vocab_size)
        logits, marked = model.logits_and(list(outputs or ()), hidden[flat.logits_index])
        if outputs is not None:
            outputs.update(marked)
        return None, logits.float()
