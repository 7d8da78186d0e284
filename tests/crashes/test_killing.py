"""A few kills of a real engine process, as `python -m tests.crashes --kills 100` does a hundred."""

from __future__ import annotations

import pytest

from tests.crashes.killing import run


@pytest.mark.slow("engine processes with a model")
def test_no_byte_differs_for_any_kind_when_the_engine_is_killed() -> None:
    outcome = run(2, seed=4, progress=False)
    assert outcome.differences == [] and outcome.num_kills >= 2
    assert outcome.num_adopted > 0, "engines go on with the KV of those before them"
    assert sum(outcome.num_cut.values()) > 4, "kills come in the midst of streams"
