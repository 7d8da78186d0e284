"""One row of the kernels' table, as data: what is run, on what, what it must move and compute, and how fast it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.goals import Goal
from kernels.int8_rows import Int8Rows, group_sums

Rate = Literal["bf16", "int8"]
Inputs = Any  # what a row's `make` returns; only the row's own functions look inside

# ||measured - expected|| / ||expected||, at most
LIMITS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_TIES = 0.01  # share of integers that may fall on the other side of a tie


class Check(NamedTuple):
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # false for NaN


class Peer(NamedTuple):
    """Another way to the same result. `make` prepares a copy of the inputs for it, outside what is timed."""

    name: str
    run: Callable[[Any], object]
    make: Callable[[Inputs], Any] = lambda inputs: inputs
    compiles: bool = False  # torch.compile: has a limit in time


@dataclass(frozen=True)
class Case:
    name: str
    number: int  # the kernel's number in the table of the project's notes
    make: Callable[[Random], Inputs]  # one copy
    run: Callable[[Inputs], object]
    check: Callable[[Inputs, Any], Check]  # compares what the first `run` of a copy returned with the reference
    bytes: int  # the bytes that a call must read and write
    flops: int = 0
    rate: Rate = "bf16"
    goals: tuple[Goal, ...] = ()
    peers: tuple[Peer, ...] = ()
    importance: int = 2  # 1 comes first
    is_warm: bool = False  # inputs come from the L2 cache, as a layer's activations do in serving

    def __str__(self) -> str:
        return self.name


class Random:
    """Random tensors on a device, from one seed. `dtype`: that of activations and float weights."""

    def __init__(self, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32)
        return values.mul_(scale).to(dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Integers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype)

    def order(self, n: int) -> Tensor:
        """0 to n - 1 in some order, int64."""
        return torch.randperm(n, generator=self._generator, device=self.device)


def near(measured: Tensor, expected: Tensor) -> Check:
    if measured.shape != expected.shape:
        return Check(float("inf"), 0.0)
    limit = LIMITS.get(measured.dtype, 0.0)
    measured, expected = measured.float(), expected.float()
    size = expected.norm().item()
    return Check((measured - expected).norm().item() / (size or 1.0), limit)


def same(measured: Tensor, expected: Tensor) -> Check:
    """Integers: the share that differs, of which there may be none."""
    return Check((measured != expected).float().mean().item(), 0.0)


def within_ties(measured: Tensor, expected: Tensor) -> Check:
    """Rounded integers: one beside the expected is a tie, if there are few."""
    difference = (measured.int() - expected.int()).abs()
    if difference.max().item() > 1:
        return Check(float("inf"), MAX_TIES)
    return Check((difference > 0).float().mean().item(), MAX_TIES)


def int8_rows(measured: Int8Rows, expected: Int8Rows) -> Check:
    """The sums are those of the q that is there."""
    sums = same(measured.sums, group_sums(measured.q))
    return worst(within_ties(measured.q, expected.q), near(measured.scale, expected.scale), sums)


def worst(*checks: Check) -> Check:
    """The worst of several checks: one that failed, else the one nearest its limit."""
    failed = [check for check in checks if not check.passed]
    return failed[0] if failed else max(checks, key=lambda check: check.error / (check.limit or 1.0))
