"""The tiers that tests run on, as the fixture `tier`: a conftest that wants it imports both fixtures."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kernels.cpu.build import NativeUnavailable, load


class TierCase(NamedTuple):
    """A tier, and blocks so small that short prompts cross many of their borders."""

    kernels: str  # the name that model.kernels has for it
    block: int  # tokens


TORCH, NATIVE = TierCase("torch", 4), TierCase("native", 32)


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """Skips where they cannot be compiled."""
    try:
        load()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=[TORCH, NATIVE], ids=lambda case: case.kernels)
def tier(request: pytest.FixtureRequest) -> TierCase:
    if request.param is NATIVE:
        request.getfixturevalue("native_kernels")
    return request.param


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """What model.kernels names a tier, with blocks of the usual size."""
    if request.param == "native":
        request.getfixturevalue("native_kernels")
    return request.param
