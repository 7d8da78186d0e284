"""The LoRA adapters on a rank, for tiers that compute one linear layer after the other: which token of a step has which."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import torch

from backend.core.step import PreparedAdapter, Row
from backend.layers.lora import TorchAdapted
from backend.models.lora import Layers
from backend.worker.adapters import DeviceAdapters
from backend.worker.input_batch import InputBatch
from kernels.cpu.lora import PackedAdapter, TokenAdapters


class TorchAdapters(DeviceAdapters[Layers]):
    """For torch operators on any device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._on_device)
        self._device = device

    def of_tokens(self, batch: InputBatch, rows: Sequence[Row]) -> TorchAdapted | None:
        """The adapters of the flat batch, each with its tokens; None when no row has one."""
        of_rows = self.of_rows(batch, rows)
        if of_rows is None:
            return None
        of_tokens = [layers for layers, row in zip(of_rows, rows) for _ in range(row.num_tokens)]
        groups: dict[int, tuple[Layers, list[int]]] = {}
        for token, layers in enumerate(of_tokens):
            if layers is not None:
                groups.setdefault(id(layers), (layers, []))[1].append(token)
        return TorchAdapted([(layers, torch.tensor(tokens, device=self._device)) for layers, tokens in groups.values()])

    def _on_device(self, adapter: PreparedAdapter) -> Layers:
        layers: Layers = adapter.weights  # type: ignore[assignment]  # what the group packs for this tier
        if self._device.type == "cpu":
            return layers  # the object itself, which keeps the adapter's pages
        return [
            {
                name: [part._replace(a=part.a.to(self._device), b=part.b.to(self._device)) for part in parts]
                for name, parts in layer.items()
            }
            for layer in layers
        ]


class NativeAdapters(DeviceAdapters[PackedAdapter]):
    """For the native CPU kernels."""

    def __init__(self, library: CDLL) -> None:
        super().__init__(packed_adapter)
        self._library, self._threads = library, torch.get_num_threads()

    def of_tokens(self, batch: InputBatch, rows: Sequence[Row]) -> TokenAdapters | None:
        """The adapters of the flat batch; None when no row has one."""
        of_rows = self.of_rows(batch, rows)
        if of_rows is None:
            return None
        return TokenAdapters(self._library, of_rows, [row.num_tokens for row in rows], self._threads)


def packed_adapter(adapter: PreparedAdapter) -> PackedAdapter:
    """The form that the native kernels read."""
    assert isinstance(adapter.weights, PackedAdapter), "the adapter was not packed for this tier"
    return adapter.weights
