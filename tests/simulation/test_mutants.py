"""The simulator's own test: it must notice every planted bug, or its silence means nothing.

The full run tries every ninth of them, EVERBATCH_EVERY=1 all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.server.mutants import MUTANTS as SERVER_MUTANTS
from tests.simulation.shrink import failure_of, first_failure

EVERY = int(os.environ.get("EVERBATCH_EVERY", "9"))
MAX_SEEDS = 250  # half of what test_simulation.py runs, so that what it runs is no near miss
BROKEN = (
    AttributeError,
    NameError,
    TypeError,
)  # what a planted bug raises when the code that it was written for has changed


@pytest.mark.parametrize("name", list(MUTANTS)[::EVERY])
def test_the_simulator_kills_the_mutant(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="everbatch.engine")
    MUTANTS[name](monkeypatch.setattr)
    seed = first_failure(range(MAX_SEEDS))
    assert seed is not None, f"{name} survives {MAX_SEEDS} schedules: the simulator is too weak"
    error, _ = failure_of(seed)
    assert not isinstance(error, BROKEN), f"{name} is broken itself, nothing has noticed it: {error!r}"


@pytest.mark.parametrize("mutants", [MUTANTS, SERVER_MUTANTS], ids=["engine", "server"])
def test_each_of_them_can_be_planted(mutants: Mapping[str, Callable[..., None]]) -> None:
    """What a bug replaces is there; otherwise it has to follow the code."""
    assert len(mutants) >= 25
    for plant in mutants.values():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch.setattr)
