"""LoRA adapters on a GPU: places in stacks (layers/lora.py), which are filled ahead of the step that needs them."""

from __future__ import annotations

import torch

from backend.api.config.schema import LoraSection
from backend.core.adapter import PreparedAdapter
from backend.layers.lora import Stacks
from backend.models.decoder import Decoder
from backend.models.lora import Layers, stack_shapes
from backend.worker.adapters import DeviceAdapters
from backend.worker.copy_streams import CopyStreams


def make_stacks(model: Decoder, max_rank: int, block_bytes: int = 0) -> Stacks:
    """Empty places for adapters of `model`."""
    config = model.config
    return Stacks(stack_shapes(config), config.num_layers, max_rank, model.dtype, model.embedding.device, block_bytes)


def stacked_adapters(stacks: Stacks, lora: LoraSection, device: torch.device) -> DeviceAdapters[int]:
    """The adapters of the batch, by their places."""

    def copy(place: int, adapter: PreparedAdapter) -> None:
        layers: Layers = adapter.weights  # type: ignore[assignment]  # what the group packs for this tier
        stacks.fill(place, layers)

    streams = CopyStreams(device, lora.copy_streams if lora.enabled else 0)
    return DeviceAdapters(lambda adapter: stacks.reserve(), stacks.take, copy, lora.ensure_workers, streams)
