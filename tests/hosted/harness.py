"""A tiny checkpoint that transformers runs, behind a Driver (tests/model/driver.py)."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path

import torch

from backend.hosted.checkpoint import HostedCheckpoint
from backend.layers.linear import make_torch_linear
from backend.models.loader import open_tensors
from backend.worker.hosted_tier import HostedTier, NativeLayers, PoolLayers
from backend.worker.native_tier import PackLinears
from backend.worker.tier import kv_layout
from backend.worker.token_adapters import NativeAdapters, TorchAdapters
from tests.hosted.tiny import content
from tests.model.driver import Driver
from tests.native.harness import CPU, Format, drive, linear_options

BLOCK_SIZE = 32  # tokens


def hosted_driver(
    directory: Path, library: CDLL | None, form: Format, takes_adapters: bool = False, **options: object
) -> Driver:
    """library: None for the torch tier. takes_adapters: as with `lora.enabled`."""
    make = make_torch_linear if library is None else PackLinears(library)
    linears = linear_options(form, make)
    checkpoint = HostedCheckpoint(content(directory), open_tensors(sorted(directory.glob("*.safetensors"))))
    model = checkpoint.build(None, getattr(torch, form.dtype), CPU, linears)
    if takes_adapters:
        model.adapters.enable()
    if library is None:
        layout = kv_layout(model.config, BLOCK_SIZE, model.dtype)
        tier = HostedTier(model, PoolLayers(model, layout), TorchAdapters(CPU))
    else:
        tier = HostedTier(model, NativeLayers(model, library, BLOCK_SIZE, form.kv_format), NativeAdapters(library))
    return drive(tier, model, library, BLOCK_SIZE, window=model.config.sliding_window, **options)
