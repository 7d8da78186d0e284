"""Triton where it can be used, and nothing where it cannot.

Kernels are functions under `@jit` in files of their own. They run

    on a GPU                                       when the launcher's tensors are on a CUDA device
    in Triton's interpreter, on a CPU              with TRITON_INTERPRET=1: tests
    or are compiled for a GPU that is not here     with EVERBATCH_TRITON=1: tests

Otherwise Triton is not imported: a CPU engine would wait half a second for it. `tl` is None then, and kernels are plain functions
that nobody calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AVAILABLE = INTERPRETED or os.environ.get("EVERBATCH_TRITON") == "1" or torch.cuda.is_available()

if AVAILABLE:
    import triton
    import triton.language as tl

    jit = triton.jit
else:
    tl = None

    def jit(function: Callable | None = None, **options: object) -> Callable:
        """Leaves the function as it is."""
        return function if function is not None else jit


class Variant(NamedTuple):
    """One specialisation of a kernel: what is compiled, and what the machine code must be like."""

    kernel: Any  # under @jit
    types: dict[str, str]  # argument -> "*bf16", "*i8", "i32", "fp32", ...; pointers are aligned to 16 bytes
    constants: dict[str, object]  # the constexpr arguments, and arguments that are None
    num_warps: int = 4
    num_stages: int = 2
    divisible: tuple[str, ...] = ()  # integer arguments that are multiples of 16
    instructions: dict[int, tuple[str, ...]] = {}  # architecture -> mnemonics that SASS must contain
    architectures: tuple[int, ...] = (80, 90, 100)  # compute capabilities times ten that it is compiled for


def runs_on(x: Tensor) -> bool:
    """Whether launchers may hand `x` to a Triton kernel; otherwise they compute the reference."""
    return runs_at(x.device)


def runs_at(device: torch.device) -> bool:
    """The same for tensors of a device."""
    return INTERPRETED or (AVAILABLE and device.type == "cuda")


def architecture_of(x: Tensor, known: Iterable[int]) -> int:
    """Whose static tables serve x's device: of `known`, the last that is not above its compute capability times ten."""
    if INTERPRETED:
        return 90
    major, minor = torch.cuda.get_device_capability(x.device)
    return max((each for each in known if each <= major * 10 + minor), default=min(known))


def next_power_of_two(n: int) -> int:
    """The first that is at least n; n > 0."""
    return 1 << (n - 1).bit_length()
