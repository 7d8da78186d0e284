"""Imports Triton where it can be used, and decides whether a launcher runs its kernel or its reference.

Kernels are functions under `@jit` in files of their own. They are

    run on a GPU                           when the launcher's tensors are on a CUDA device
    run in Triton's interpreter            with TRITON_INTERPRET=1, on a CPU, in tests
    compiled for a GPU that is not here    with EVERBATCH_TRITON=1, in tests

Otherwise Triton is not imported, because that takes half a second. `tl` is None then, and kernels are plain functions that are
never called.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "AVAILABLE",
    "INTERPRETED",
    "Variant",
    "architecture_of",
    "jit",
    "next_power_of_two",
    "runs_at",
    "runs_on",
    "tl",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AVAILABLE = INTERPRETED or os.environ.get("EVERBATCH_TRITON") == "1" or torch.cuda.is_available()

if AVAILABLE:
    import triton
    import triton.language as tl

    jit = triton.jit
else:
    tl = None

    def jit(function: Any = None, **options: object) -> Any:
        """Stands in for triton.jit: returns the function, or a decorator that does, unchanged."""
        return function if function is not None else jit


class Variant(NamedTuple):
    """One specialisation of a kernel to compile in tests, and the instructions that its machine code must contain."""

    kernel: Any  # under @jit
    types: Mapping[str, str]  # argument -> "*bf16", "*i8", "i32", "fp32", ...; pointers are aligned to 16 bytes
    constants: Mapping[str, object]  # the constexpr arguments, and arguments that are None
    num_warps: int = 4
    num_stages: int = 2
    divisible: tuple[str, ...] = ()  # integer arguments that are multiples of 16
    instructions: Mapping[int, tuple[str, ...]] = {}  # architecture -> mnemonics that SASS must contain
    architectures: tuple[int, ...] = (80, 90, 100)  # the compute capabilities to compile for, times ten


def runs_on(x: Tensor) -> bool:
    """True if launchers may hand `x` to a Triton kernel; otherwise they compute the reference."""
    return runs_at(x.device)


def runs_at(device: torch.device) -> bool:
    """True if launchers may hand tensors on `device` to a Triton kernel."""
    return INTERPRETED or (AVAILABLE and device.type == "cuda")


def architecture_of(x: Tensor, known: Iterable[int]) -> int:
    """The architecture whose tables serve x's device: the highest of `known` up to its compute capability times ten."""
    if INTERPRETED:
        return 90
    major, minor = torch.cuda.get_device_capability(x.device)
    return max((each for each in known if each <= major * 10 + minor), default=min(known))


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()
