"""The log of sessions: the second of something, the order of its writes, and its end in good order."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from backend.api import Request, SamplingConfig, SessionConfig
from backend.core.messages import Resume
from backend.core.sequence import Sequence, SessionKey
from backend.engine import session_log
from backend.engine.session_log import SessionLog, fingerprint_of
from tests.crashes.lives import Lives
from tests.engine.test_session_log import make, turn
from tests.fakes.hash_worker import oracle


def test_a_session_that_is_replaced_within_one_write_stays() -> None:
    """Its first turn begins and ends in one step, so the end of the old session and the new turn are noted at once."""
    lives = Lives(make)
    turn(lives, 7, [1], start=True)
    first = turn(lives, 7, [5], 1, start=True)
    lives.step()
    lives.core.sessions.flush()
    lives.crash()
    assert turn(lives, 7, [6]) == oracle([5, *first, 6], 4, 1000, counter=1)


def test_turns_that_wait_for_one_write_are_all_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(make)
    log = [1, *turn(lives, 7, [1], start=True)]
    with monkeypatch.context() as slow:
        slow.setattr(SessionLog, "flush", lambda *arguments: None)
        for number in (2, 3):
            log += [number, *turn(lives, 7, [number])]
    lives.core.sessions.flush()
    lives.crash()
    assert turn(lives, 7, [4]) == oracle([*log, 4], 4, 1000, counter=12)


@pytest.mark.parametrize("num_crashes", [0, 1, 2])
def test_the_latest_turn_of_a_restored_session_can_be_run_again(num_crashes: int) -> None:
    """Its client has not had its end, and sends it once more: the same tokens, and the session has them once."""
    lives = Lives(make)

    def ask(number: int, is_again: bool = False) -> list[int]:
        sampled = SamplingConfig(temperature=1.0, seed=5 if number == 1 else None)  # later turns go on in its stream
        session = SessionConfig(7, start=number == 1)
        request = Request([number], 4, streaming=True, session=session, sampling_config=sampled)
        client = lives.ask(request, Resume(turn=f"turn {number}", is_again=is_again))
        lives.run(lambda: client.has_ended)
        return [token for response in client.responses for token in response.result.output_token_ids[0]]

    first, second = ask(1), ask(2)
    for _ in range(num_crashes):
        lives.crash()
    assert ask(2, is_again=True) == second == oracle([1, *first, 2], 4, 1000, seed=5, counter=4)
    assert list(lives.core.sessions.get(SessionKey("", 7)).token_ids) == [1, *first, 2, *second]
    assert ask(3) == oracle([1, *first, 2, *second, 3], 4, 1000, seed=5, counter=8)
    lives.core.check_integrity()


def test_kv_of_a_turn_that_was_undone_is_found_by_nobody() -> None:
    """Other tokens take its place in the blocks, and a new request has the same tokens as the turn that was undone."""
    lives = Lives(make)

    def ask(token: int, is_again: bool) -> list[int]:
        request = Request([token], 9, streaming=True, session=SessionConfig(7))
        client = lives.ask(request, Resume(turn="second", is_again=is_again))
        lives.run(lambda: client.has_ended)
        return [token for each in client.responses for token in each.result.output_token_ids[0]]

    first = [1, *turn(lives, 7, [1], start=True)]
    undone = [*first, 2, *ask(2, False)]
    assert ask(3, True) == oracle([*first, 3], 9, 1000, counter=4)
    fresh = lives.ask(Request(undone, 4, streaming=True))
    lives.run(lambda: fresh.has_ended)
    assert [t for each in fresh.responses for t in each.result.output_token_ids[0]] == oracle(undone, 4, 1000)
    lives.core.check_integrity()


def test_a_log_that_is_written_anew_during_turns_has_what_was_before_them() -> None:
    """The turns are run again on top of it: one that goes on, and one that begins its session."""
    lives = Lives(make)
    first = turn(lives, 7, [1], start=True)
    sessions = SessionConfig(7), SessionConfig(8, start=True)
    clients = [lives.ask(Request([2], 20, streaming=True, session=session)) for session in sessions]
    lives.run(lambda: all(len(client.responses) >= 3 for client in clients))
    lives.core.sessions.log.begin(lives.core.sessions.all())
    for _ in range(2):
        lives.crash()
    lives.run(lambda: all(client.has_ended for client in clients))
    got = [[t for each in client.responses for t in each.result.output_token_ids[0]] for client in clients]
    assert got == [oracle([1, *first, 2], 20, 1000, counter=4), oracle([2], 20, 1000)]
    assert sorted(seq.num_tokens for seq in lives.core.sessions.all()) == [1 + 20, 1 + 4 + 1 + 20]


def test_what_a_session_knows_besides_its_tokens_is_restored() -> None:
    lives = Lives(make)
    turn(lives, 7, [1], start=True, salt="a")
    turn(lives, 7, [2], salt="a")
    key = SessionKey("a", 7)

    def facts() -> list[object]:
        seq: Sequence = lives.core.sessions.get(key)
        return [seq.adapter, seq.kv_origin, seq.namespace, seq.turn, seq.num_history_tokens, seq.random_state_before]

    lives.core.sessions.get(key).adapter = "named"  # as the intake sets it; this model has no adapters
    lives.core.sessions.log.begin(lives.core.sessions.all())
    before = facts()
    lives.crash()
    assert facts() == before and all(before)


def test_a_log_that_is_closed_has_what_ended_just_before() -> None:
    """The end of a session is written one call later than turns are, and closing makes both calls."""
    lives = Lives(make)
    for session in (1, 2):
        turn(lives, session, [session], start=True)
    lives.core.sessions.erase(SessionKey("", 1))
    lives.core.sessions.close()
    again = SessionLog(lives.files, fingerprint_of(lives.core.model), boot=b"another boot")
    assert [latest.session_id for latest, _, _ in again.restore()] == [2] and again.num_skipped == 0


def test_the_mark_of_a_closed_log_reaches_the_disk_after_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    lives, calls = Lives(make), []
    turn(lives, 1, [1], start=True)
    lives.core.sessions.erase(SessionKey("", 1))
    write = os.pwrite

    def pwrite(file: int, data: bytes, at: int) -> int:
        calls.append("record" if at else "header")
        return write(file, data, at)

    monkeypatch.setattr(session_log.os, "pwrite", pwrite)
    monkeypatch.setattr(session_log.os, "fsync", lambda file: calls.append("fsync"))
    lives.core.sessions.close()
    assert calls == ["record", "fsync", "header", "fsync"]


class Killed(BaseException):
    """The engine ends within a call of the operating system."""


@pytest.mark.parametrize("writes_half", [False, True])
def test_killed_while_it_begins_a_new_file_the_log_has_all_sessions(
    monkeypatch: pytest.MonkeyPatch, writes_half: bool
) -> None:
    """At each of its calls, one start after the other. The header, of 64 bytes, is written as one."""
    lives = Lives(make)
    logs = {session: [session, *turn(lives, session, [session], start=True)] for session in (1, 2)}
    write, truncate, left = os.pwrite, os.ftruncate, [0]

    def spend() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    def pwrite(file: int, data: bytes, at: int) -> int:
        if writes_half and not left[0] and at:
            write(file, data[: len(data) // 2], at)
        spend()
        return write(file, data, at)

    def ftruncate(file: int, size: int) -> None:
        spend()
        truncate(file, size)

    for num_calls in range(5):
        log = SessionLog(lives.files, fingerprint_of(lives.core.model))
        assert {each.session_id: list(tokens) for each, tokens, _ in log.restore()} == logs, num_calls - 1
        left[0] = num_calls
        with monkeypatch.context() as killed, nullcontext() if num_calls == 4 else pytest.raises(Killed):
            killed.setattr(session_log.os, "pwrite", pwrite)
            killed.setattr(session_log.os, "ftruncate", ftruncate)
            log.begin(lives.core.sessions.all())
    lives.crash()
    assert len(lives.core.sessions) == 2
