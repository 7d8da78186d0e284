"""What the GPU tests share. They run under pytest, and without it by `python -m tests.gpu`: a GPU machine may not have it.

EVERBATCH_GPU_TESTS=cpu runs them in Triton's interpreter (with TRITON_INTERPRET=1), at tiny shapes: to test the tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import stand_in
from benchmarks.gpu.case import LIMITS
from kernels.common.kv_format import KV_FORMATS, KVPool, QuantizedPool, plain_pool, write_cells

try:
    import pytest
except ImportError:
    pytest = None

stand_in.install_where_missing()  # the stand-in of msgspec, before anything imports the engine

DEVICE = torch.device(os.environ.get("EVERBATCH_GPU_TESTS", "cuda"))
IS_GPU = DEVICE.type == "cuda"
REASON = "there is no CUDA device" if IS_GPU and not torch.cuda.is_available() else ""
Function = Callable[..., None]
HALVES = (torch.float16, torch.bfloat16)

pytestmark = [] if pytest is None else [pytest.mark.skipif(bool(REASON), reason=REASON)]


def each(names: str, values: Sequence[Any]) -> Callable[[Function], Function]:
    """pytest.mark.parametrize, known to `python -m tests.gpu` as well."""

    def marked(function: Function) -> Function:
        function.__dict__.setdefault("given", []).append((names, list(values)))
        return function if pytest is None else pytest.mark.parametrize(names, values, ids=str)(function)

    return marked


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Returns the same random numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_near(measured: Tensor, expected: Tensor, limit: float | None = None) -> None:
    """Compares in the norm, by the limit of measured's dtype."""
    assert measured.shape == expected.shape, f"{tuple(measured.shape)} != {tuple(expected.shape)}"
    limit = LIMITS[measured.dtype] if limit is None else limit
    measured, expected = measured.double(), expected.double()
    error = (measured - expected).norm().item() / (expected.norm().item() or 1.0)
    assert error <= limit, f"error {error:.1e}, limit {limit:.1e}"


def make_pool(blocks: int, block_size: int, kv_heads: int, head_dim: int, kv: str, dtype: torch.dtype) -> KVPool:
    """Returns a pool of random content."""
    tokens = random(blocks, block_size, 2, kv_heads, head_dim, dtype=dtype) + 0.3
    if kv == "auto":
        return plain_pool(tokens)
    layout = QuantizedPool(block_size, kv_heads, head_dim, KV_FORMATS[kv])
    pool = layout.view(torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device=DEVICE))
    cells = torch.arange(blocks * block_size, device=DEVICE)
    write_cells(pool, cells // block_size, cells % block_size, *tokens.flatten(0, 1).unbind(1))
    return pool


def make_tables(rows: int, width: int) -> Tensor:
    """Each row's blocks, in no order."""
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(width))
    return order.view(rows, width).to(DEVICE, torch.int32)
