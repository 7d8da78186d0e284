"""The simulation's own test: it must notice planted bugs around the engine, or its silence means nothing.

The full run tries some of them; EVERBATCH_EVERY=1, or `python -m tests.simulation.server.mutants`, all.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.server.mutants import MUTANTS
from tests.simulation.server.shrink import first_failure

SAMPLE = (
    "held_requests_are_not_sent_again",
    "lost_requests_are_refused_at_once",
    "an_emptied_mailbox_stays",
    "sessions_are_not_written",
    "a_frame_overtakes_those_that_wait",
    "a_socket_is_closed_without_hanging_up",
    "a_stream_closes_without_its_gate",
    "the_poller_asks_without_the_gate",
    "a_text_stays_in_its_queue",
    "an_end_waits_for_the_disk",
    "the_store_stays_open",
)  # each is noticed within a few schedules
NAMES = SAMPLE if os.environ.get("EVERBATCH_EVERY") != "1" else tuple(MUTANTS)
MAX_SEEDS = 400
BROKEN = (
    AttributeError,
    NameError,
    TypeError,
)  # raised by a planted bug when the code that it was written for has changed


@pytest.mark.parametrize("name", NAMES)
def test_the_simulation_notices_the_planted_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch.setattr)
    found = first_failure(range(MAX_SEEDS))
    assert found is not None, f"{name} survives {MAX_SEEDS} schedules: the simulation is too weak"
    assert not isinstance(found.error, BROKEN), f"{name} is broken itself, nothing has noticed it: {found.error!r}"


def test_there_are_enough_planted_bugs() -> None:
    assert len(MUTANTS) >= 60
