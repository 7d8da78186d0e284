"""What an engine leaves to the next one about trials, and what clients make of it."""

from __future__ import annotations

import os

from backend.api import EngineConfig
from backend.core.messages import CLIENT_SHIFT, Former
from backend.executor.kept_files import KeptFiles
from tests.crashes.test_rules import Kept, stream


def test_what_the_former_engine_has_left_says_who_was_on_trial_when_it_ended() -> None:
    """Its last words about trials may not have reached this client."""
    for former, is_ended in (
        (Former("engine 3", 3 << CLIENT_SHIFT | 1), True),
        (Former("engine 3", None), False),
        (Former("engine 3", 8 << CLIENT_SHIFT | 1), False),
        (Former("another one", 3 << CLIENT_SHIFT | 1), False),
    ):
        kept = Kept()
        kept.add(stream([1]))
        kept.lose(2)
        kept.lose(3)
        kept.replay.note_trial(3 << CLIENT_SHIFT | 1 if former.trial is None else None)
        kept.lose(4, former=former)
        assert bool(kept.refused) == is_ended, former


def test_the_trial_of_an_engine_outlives_it_and_a_torn_record_says_nothing() -> None:
    kept = KeptFiles.make(EngineConfig())
    try:
        assert kept.former() == Former()
        kept.note_trial("0123456789abcdef", None)
        assert kept.former() == Former("0123456789abcdef", None)
        for request_id in (0, 5 << CLIENT_SHIFT | 7):
            kept.note_trial("0123456789abcdef", request_id)
            assert kept.former() == Former("0123456789abcdef", request_id)
        os.pwrite(kept.trial, b"\x01", 17)
        assert kept.former() == Former()
    finally:
        kept.close()
