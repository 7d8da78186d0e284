"""The native kernels for this machine."""

from __future__ import annotations

from ctypes import CDLL

import pytest

from kernels.cpu.library import load_kernels
from tests.model.tiers import native_kernels, tier  # noqa: F401 (fixtures)


@pytest.fixture(scope="session")
def kernels(native_kernels: None) -> CDLL:  # noqa: F811
    return load_kernels()
