"""Random numbers, and how near is near enough."""

from __future__ import annotations

import torch
from torch import Tensor

# Of the interpreter: relative to 1 + |expected|. Its float32 -> bfloat16 truncates, so one unit in the last place of bfloat16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def assert_near(measured: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """`factor` multiplies the tolerance of measured's dtype."""
    assert measured.shape == expected.shape
    error = ((measured.double() - expected.double()).abs() / (1 + expected.double().abs())).max().item()
    limit = factor * TOLERANCE.get(measured.dtype, 0.0)
    assert error <= limit, f"error {error:.1e}, limit {limit:.1e}"
