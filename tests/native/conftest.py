"""The native kernels in every variant that this machine runs, and with AddressSanitizer in a process of test_sanitized."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from ctypes import CDLL
from functools import cache

import pytest
import torch

from backend.worker import kv_storage
from kernels.cpu.build import NativeUnavailable
from kernels.cpu.isa import AMX_EMULATED, supported_isas
from kernels.cpu.library import load_kernels
from kernels.cpu.memory import Arena
from tests.model.tiers import native_kernels  # noqa: F401 (fixture)
from tests.native.harness import SANITIZE

ALL = "EVERBATCH_ALL_ISAS"  # set: every variant that this machine runs; else its best, AVX2's and AMX's emulation
_USUAL = tuple(isa for isa in supported_isas() if isa in (supported_isas()[0], "avx2") or ALL in os.environ)
VARIANTS = supported_isas()[:1] if SANITIZE in os.environ else (*_USUAL, AMX_EMULATED)


@pytest.fixture(autouse=SANITIZE in os.environ, scope="session")
def guarded_memory() -> Iterator[None]:
    """Under the sanitizer weights and KV have memory of their own, with guards around it, instead of shared mappings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "empty", lambda self, num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
        patch.setattr(kv_storage, "allocate", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        yield


@pytest.fixture(scope="session", params=VARIANTS)
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def variant() -> Callable[[str | None], CDLL]:
    """The kernels for an instruction set; None = the best one."""
    return cache(_load)


@pytest.fixture(scope="session")
def kernels(isa: str, variant: Callable[[str | None], CDLL]) -> CDLL:
    return variant(isa)


@pytest.fixture(scope="session")
def best_kernels(variant: Callable[[str | None], CDLL]) -> CDLL:
    return variant(None)


def _load(isa: str | None) -> CDLL:
    try:
        return load_kernels(isa, sanitize=SANITIZE in os.environ)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
