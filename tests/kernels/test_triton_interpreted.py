"""The Triton kernels without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.triton_child import ENGINES, INTERPRETED, PYTEST_TIMEOUT_S, prove


@pytest.mark.timeout(PYTEST_TIMEOUT_S)
def test_every_kernel_gives_what_its_reference_gives() -> None:
    prove("TRITON_INTERPRET", INTERPRETED, *(f"--ignore={file}" for file in ENGINES))
