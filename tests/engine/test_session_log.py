"""The log of sessions: what an engine knows of the sessions of the one before, whatever has happened to the files."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.api import ConfigError, EngineConfig, Request, SessionConfig
from backend.api.config.schema import KvCacheConfig, SchedulerConfig, SessionsConfig
from backend.core.step import ModelInfo
from backend.engine import session_log
from backend.engine.core import EngineCore
from backend.engine.session_files import in_directory, in_memory
from backend.engine.session_log import HEADER_BYTES, SessionLog, fingerprint_of
from tests.crashes.lives import Lives
from tests.fakes.hash_worker import HashWorkerGroup, oracle

CONFIG = EngineConfig(
    kv_cache=KvCacheConfig(block_size=4, max_tokens=4096), scheduler=SchedulerConfig(max_batch_size=8)
)


def make(config: EngineConfig = CONFIG, **worker: object) -> EngineCore:
    return EngineCore(config, HashWorkerGroup(**worker))


def turn(
    lives: Lives, session: int, prompt: list[int], max_tokens: int = 4, salt: str = "", **fields: object
) -> list[int]:
    """The tokens of a turn."""
    request = Request(prompt, max_tokens, streaming=True, session=SessionConfig(session, **fields), cache_salt=salt)
    client = lives.ask(request)
    lives.run(lambda: client.has_ended)
    return [token for response in client.responses for token in response.result.output_token_ids[0]]


def is_known(lives: Lives, session: int) -> bool:
    client = lives.ask(Request([1], 1, streaming=True, session=SessionConfig(session)))
    lives.run(lambda: client.has_ended)
    return not client.responses[-1].has_error()


def test_sessions_go_on_with_their_tokens_and_their_place_in_the_random_stream() -> None:
    lives, logs = Lives(make), {}
    for session in range(5):
        logs[session] = [session, 2, *turn(lives, session, [session, 2], start=True)]
    for round_ in range(3):
        lives.crash()
        for session, log in logs.items():
            new = turn(lives, session, [9])
            assert new == oracle([*log, 9], 4, 1000, counter=4 * (round_ + 1))
            log += [9, *new]
    assert len(lives.core.sessions) == 5


def test_a_namespace_keeps_its_sessions_to_itself() -> None:
    lives = Lives(make)
    turn(lives, 7, [1], salt="a", start=True)
    lives.crash()
    assert not is_known(lives, 7)
    assert turn(lives, 7, [2], salt="a") != []


def test_rewound_and_replaced_sessions_are_as_they_were_left() -> None:
    lives = Lives(make)
    first = [1, 2, *turn(lives, 7, [1, 2], start=True)]
    second = turn(lives, 7, [8], step=3)
    lives.crash()
    third = turn(lives, 7, [9])
    assert third == oracle([*first[:3], 8, *second, 9], 4, 1000, counter=8)
    fresh = turn(lives, 7, [5], start=True)
    lives.crash()
    assert turn(lives, 7, [6]) == oracle([5, *fresh, 6], 4, 1000, counter=4)


def test_erased_sessions_stay_erased() -> None:
    lives = Lives(make)
    for session in (1, 2, 3):
        turn(lives, session, [session], start=True)
    turn(lives, 1, [4], end=True)
    lives.core.stop_session(99, 2, True)
    lives.step()
    lives.step()
    lives.crash()
    assert [is_known(lives, session) for session in (1, 2, 3)] == [False, False, True]


def test_idle_time_goes_on_and_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(kv_cache=CONFIG.kv_cache, sessions=SessionsConfig(max_sessions=3, idle_ttl_s=100.0))
    now = [1000.0]
    monkeypatch.setattr(session_log.time, "time", lambda: now[0])
    monkeypatch.setattr(SessionLog.__init__, "__defaults__", (None, lambda: now[0]))
    lives = Lives(lambda: make(config))
    for session in range(4):
        turn(lives, session, [session], start=True)
        now[0] += 20.0
    lives.crash()
    lives.step()
    assert len(lives.core.sessions) == 3
    now[0] += 50.0  # the oldest of them has been idle for 110 s, the next one for 90 s
    for _ in range(2):  # the second engine has it from the first one, whose sessions were not used
        lives.crash()
        lives.step()
    assert [is_known(lives, session) for session in range(4)] == [False, False, True, True]


def test_a_large_log_is_written_anew_and_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_log, "SPARE_BYTES", 500)
    lives, log = Lives(make), []
    generations = set()
    for number in range(40):
        new = turn(lives, 7, [number], start=number == 0, **({} if number == 0 else {"step": 6}))
        log = [*log[:6], number, *new]
        generations.add(lives.core.sessions.log._generation)
        sizes = [os.fstat(file).st_size for file in lives.files]
        assert max(sizes) < 4000 and min(sizes) == 0
    assert len(generations) > 3
    lives.crash()
    assert turn(lives, 7, [3]) == oracle([*log, 3], 4, 1000, counter=160)


def damaged(change: Callable[[bytearray], None]) -> Lives:
    """Two sessions of two turns each, an engine that dies, and what is changed in the file that it has used."""
    lives = Lives(make)
    for number in range(2):
        for session in (1, 2):
            turn(lives, session, [session], start=number == 0)
    file = max(lives.files, key=lambda file: os.fstat(file).st_size)
    data = bytearray(os.pread(file, 1 << 20, 0))
    change(data)
    os.ftruncate(file, 0)
    os.pwrite(file, bytes(data), 0)
    lives.crash()
    return lives


def test_half_a_record_at_the_end_is_as_if_it_was_not_there() -> None:
    """Its turn had not been answered, so no client knows of it."""

    def cut(data: bytearray) -> None:
        del data[-7:]

    lives = damaged(cut)
    assert len(lives.core.sessions) == 2 and lives.core.sessions.log.num_skipped == 0
    first = oracle([2], 4, 1000)
    assert turn(lives, 2, [5]) == oracle([2, *first, 5], 4, 1000, counter=4)


@pytest.mark.parametrize("seed", range(30))
def test_a_flipped_bit_anywhere_restores_nothing_wrong(seed: int) -> None:
    """A damaged log may lack turns, so no session is restored. A bit in half a record, or in a length, ends the log there."""
    rng = random.Random(seed)

    def flip(data: bytearray) -> None:
        at = rng.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8

    lives = damaged(flip)
    whole = {}
    for session in (1, 2):
        first = [session, *oracle([session], 4, 1000), session]
        whole[session] = [*first, *oracle(first, 4, 1000, counter=4)]
    for seq in lives.core.sessions.all():
        log = list(seq.token_ids)
        assert log == whole[seq.session_key.id][: len(log)]
    skipped = lives.core.sessions.log.num_skipped
    assert skipped or len(lives.core.sessions) == 2
    assert turn(lives, 1, [4], start=True) == oracle([4], 4, 1000), "it goes on without them"


def test_a_log_of_another_model_or_of_a_machine_that_has_ended_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    model = ModelInfo("hash", 1000, 1 << 20)
    files = in_memory()
    log = SessionLog(files, fingerprint_of(model), boot=b"1" * 16)
    log.begin(iter([]))
    for fingerprint, boot, why in (
        (b"x" * 16, b"1" * 16, "is of another model"),
        (fingerprint_of(model), b"2" * 16, "was not closed before the machine ended"),
        (fingerprint_of(model), b"", "was not closed before the machine ended"),
    ):
        other = SessionLog(files, fingerprint, boot=boot)
        assert other.restore() == [] and other.num_skipped == 1 and why in caplog.text
    log.close(lambda: iter([]))
    again = SessionLog(files, fingerprint_of(model), boot=b"2" * 16)
    assert again.restore() == [] and again.num_skipped == 0, "it was closed in good order"


def test_a_full_disk_ends_the_log_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lives = Lives(make)
    turn(lives, 7, [1], start=True)

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(session_log.os, "pwrite", full)
    second = turn(lives, 7, [2])
    monkeypatch.undo()
    assert len(second) == 4 and "No space left on device" in caplog.text
    lives.crash()
    assert not is_known(lives, 7), "rather none than one that lacks a turn"


def test_files_in_a_directory_belong_to_one_engine_and_to_this_user(tmp_path: Path) -> None:
    directory = tmp_path / "sessions"
    files = in_directory(str(directory))
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    with pytest.raises(ConfigError, match="another engine uses"):
        in_directory(str(directory))
    for file in files:
        os.close(file)
    for file in in_directory(str(directory)):
        os.close(file)
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        in_directory(str(directory))
    link = tmp_path / "linked"
    link.mkdir(mode=0o700)
    (link / "sessions-0.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        in_directory(str(link))


def test_the_header_is_smaller_than_its_place() -> None:
    assert session_log._HEADER.size + 8 <= HEADER_BYTES
