"""TorchTier: runs the model layer by layer, with torch operators on a CPU and Triton kernels on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backend.core.adapter import PreparedAdapter
from backend.core.step import Row
from backend.layers.lora import TorchAdapted
from backend.models.decoder import Decoder
from backend.models.lora import Layers
from backend.worker.adapters import DeviceAdapters
from backend.worker.input_batch import InputBatch
from backend.worker.tier import KVBlock
from kernels.common.kv_format import PoolLayout
from kernels.paged_attention import plan_attention


class TorchTier:
    name = "torch"

    def __init__(self, model: Decoder, layout: PoolLayout) -> None:
        self._model = model
        self._layout = layout
        self.adapters: DeviceAdapters[Layers] = DeviceAdapters(self._place)

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
    ) -> tuple[None, Tensor]:
        """See Tier.run. Logits are always computed, and the most likely tokens never: the sampler finds them."""
        model, config = self._model, self._model.config
        flat = batch.flatten(rows, num_logits)
        device, dtype = model.embedding.device, model.embedding.dtype
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
        hidden = model.forward(
            flat.token_ids, flat.positions, flat.cells, plans, views, flat.embedded, self._adapted(batch, rows)
        )
        if len(flat.logits_index) == 0:
            return None, torch.empty(0, config.vocab_size)
        logits, marked = model.logits_and(list(outputs or ()), hidden[flat.logits_index])
        if outputs is not None:
            outputs.update(marked)
        return None, logits.float()

    def _place(self, adapter: PreparedAdapter) -> Layers:
        device = self._model.embedding.device
        layers: Layers = adapter.weights  # type: ignore[assignment]  # what the group packs for this tier
        if device.type == "cpu":
            return layers  # the object itself, which keeps the adapter's pages
        return [
            {
                name: [part._replace(a=part.a.to(device), b=part.b.to(device)) for part in parts]
                for name, parts in layer.items()
            }
            for layer in layers
        ]

    def _adapted(self, batch: InputBatch, rows: list[Row]) -> TorchAdapted | None:
        """The adapters of the flat batch, each with its tokens."""
        of_rows = self.adapters.of_rows(batch, rows)
        if of_rows is None:
            return None
        device = self._model.embedding.device
        of_tokens = [layers for layers, row in zip(of_rows, rows) for _ in range(row.num_tokens)]
        groups: dict[int, tuple[Layers, list[int]]] = {}
        for token, layers in enumerate(of_tokens):
            if layers is not None:
                groups.setdefault(id(layers), (layers, []))[1].append(token)
        return TorchAdapted([(layers, torch.tensor(tokens, device=device)) for layers, tokens in groups.values()])
