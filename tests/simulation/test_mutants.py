"""The simulator's own test: it must notice every planted bug, or its silence means nothing."""

from __future__ import annotations

import logging

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.shrink import first_failure

MAX_SEEDS = 2000


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulator_kills_the_mutant(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="everbatch.engine")
    MUTANTS[name](monkeypatch.setattr)
    assert first_failure(range(MAX_SEEDS)) is not None, (
        f"{name} survives {MAX_SEEDS} schedules: the simulator is too weak"
    )


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 25
