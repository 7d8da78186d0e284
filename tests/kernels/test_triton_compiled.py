"""The Triton kernels, compiled for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.triton_child import PYTEST_TIMEOUT_S, prove


@pytest.mark.timeout(PYTEST_TIMEOUT_S)
def test_every_kernel_compiles_as_it_was_meant() -> None:
    prove("EVERBATCH_TRITON", Path(__file__).parent / "compiled")
