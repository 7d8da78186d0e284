"""Whole models and engines on the Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.triton_child import ENGINES, PYTEST_TIMEOUT_S, prove


@pytest.mark.timeout(PYTEST_TIMEOUT_S)
def test_engines_on_these_kernels_give_what_they_give_on_torch_operators() -> None:
    prove("TRITON_INTERPRET", *ENGINES)
