"""A tiny checkpoint that transformers runs, behind a Driver (tests/model/driver.py)."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path

import torch

from backend.hosted.checkpoint import HostedCheckpoint
from backend.layers.linear import make_torch_linear
from backend.models.linears import LinearOptions
from backend.models.loader import open_tensors
from backend.worker.hosted_tier import HostedTier, NativeLayers, PagedLayers
from backend.worker.native_tier import PackLinears
from backend.worker.tier import kv_layout
from tests.hosted.tiny import content
from tests.model.driver import Driver
from tests.native.harness import CPU, Format, drive, rounding

BLOCK_SIZE = 32  # tokens


def hosted_driver(directory: Path, library: CDLL | None, form: Format, **options: object) -> Driver:
    """library: None for the torch tier."""
    make = make_torch_linear if library is None else PackLinears(library)
    linears = LinearOptions(form.quantization, form.group, make, rounding())
    checkpoint = HostedCheckpoint(content(directory), open_tensors(sorted(directory.glob("*.safetensors"))))
    model = checkpoint.build(None, getattr(torch, form.dtype), CPU, linears)
    if library is None:
        tier = HostedTier(model, PagedLayers(model, kv_layout(model.config, BLOCK_SIZE, model.dtype)))
    else:
        tier = HostedTier(model, NativeLayers(model, library, BLOCK_SIZE, form.kv_bits))
    return drive(tier, model, library, BLOCK_SIZE, window=model.config.sliding_window, **options)
