"""What the machine code of the recurrence must be like."""

from __future__ import annotations

import pytest

from kernels import linear_recurrence
from tests.kernels.toolchain import compile_variant

COLUMNS, LEVELS = 4, 4  # of S in a thread; of a sum over the 16 threads that share a column


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("name", ["delta-16x128x128", "mamba2-64x128x64"])
def test_every_token_runs_through_the_same_instructions(name: str, architecture: int) -> None:
    """A copy of them for first or last tokens might round otherwise, and a sequence's bits would tell how it was cut."""
    made = compile_variant(linear_recurrence.variants()[name], architecture)
    sums = 2 if name.startswith("delta") else 1
    assert made.count("SHFL") == made.count("SHFL.BFLY") == sums * COLUMNS * LEVELS
    in_loop = [instruction for instruction in made.loop("SHFL.BFLY") if "SHFL" in instruction]
    assert len(in_loop) == sums * COLUMNS * LEVELS
    assert not made.count("LDL") and not made.count("STL")
