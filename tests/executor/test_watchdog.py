"""Real engine processes that stop, or hang: what is told to whom, and that another one takes over."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from backend.api import EngineUnavailable, ErrorCode, Request
from backend.api.config.schema import TritonConfig
from backend.executor import Executor
from backend.executor.engine_supervisor import MAX_RESTARTS
from backend.wire.client import wait_until
from tests.executor.hash_engine import HANGS
from tests.executor.helpers import CONFIG, drain, tokens_of
from tests.fakes.hash_worker import oracle

PATIENCE_S = 2.0


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    """The executor that owns an engine process."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.executor.hash_engine "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("EVERBATCH_PYTHON", str(program))
    config = msgspec.structs.replace(
        CONFIG, triton=TritonConfig(watchdog_timeout_s=PATIENCE_S, step_timeout_s=PATIENCE_S)
    )
    with Executor.launch(config, str(tmp_path / "run" / "engine.sock")) as executor:
        yield executor


@pytest.fixture
def guest(owner: Executor, tmp_path: Path) -> Iterator[Executor]:
    """An executor of another process's engine, as the text models have."""
    with Executor.attach(str(tmp_path / "run" / "engine.sock"), 5) as executor:
        yield executor


def set_patience(owner: Executor, seconds: float) -> None:
    owner._process._limits = TritonConfig(watchdog_timeout_s=seconds)


def check_that_it_serves(executor: Executor) -> None:
    assert wait_until(executor.is_ready, 10)
    request_id = executor.enqueue_request(Request([1, 2], 4, streaming=True))
    assert tokens_of(drain(executor, [request_id])[request_id]) == oracle([1, 2], 4, 1000)


@pytest.mark.feature("002-34")
def test_a_stopped_engine_is_not_ready_then_killed_and_another_one_serves(owner: Executor, guest: Executor) -> None:
    set_patience(owner, 60.0)
    check_that_it_serves(owner)
    stopped, answers = owner._process.pid, queue.SimpleQueue()
    os.kill(stopped, signal.SIGSTOP)
    for executor in (owner, guest):
        executor.submit(Request([3, 4], 200, streaming=True), answers.put)  # nobody knows yet
    for executor in (owner, guest):
        assert wait_until(lambda executor=executor: not executor.is_ready(), 10)
        with pytest.raises(EngineUnavailable, match="no sign of life"):
            executor.submit(Request([1], 1), answers.put)
    assert owner._process.pid == stopped and answers.empty(), "those in flight wait while it may come back"
    set_patience(owner, PATIENCE_S)
    told = [answers.get(timeout=20).result for _ in range(400)]
    assert sorted(each.output_token_ids[0][0] for each in told) == sorted(2 * oracle([3, 4], 200, 1000)), "they go on"
    for executor in (owner, guest):
        check_that_it_serves(executor)
    assert owner._process.pid != stopped and owner._process.num_deaths == 1 and answers.empty()


def test_an_engine_that_goes_on_in_time_is_ready_again_and_loses_nothing(owner: Executor) -> None:
    set_patience(owner, 60.0)
    stopped = owner._process.pid
    os.kill(stopped, signal.SIGSTOP)
    request_id = owner.enqueue_request(Request([3, 4], 20, streaming=True))
    assert wait_until(lambda: not owner.is_ready(), 10)
    os.kill(stopped, signal.SIGCONT)
    assert tokens_of(drain(owner, [request_id])[request_id]) == oracle([3, 4], 20, 1000)
    check_that_it_serves(owner)
    assert owner._process.pid == stopped


def test_a_step_that_never_ends_is_ended_by_the_watchdog(owner: Executor) -> None:
    """Three times, the last time with nothing beside it: then the request that caused it is told so."""
    hung, answers = owner._process.pid, queue.SimpleQueue()
    owner._process._back_off._delay_s = 0.01
    owner.submit(Request([HANGS], 4), answers.put)
    assert answers.get(timeout=40).error_code is ErrorCode.INTERNAL
    check_that_it_serves(owner)
    assert owner._process.pid != hung and owner._process.num_deaths == 3


def test_a_stopped_engine_does_not_make_anybody_wait_who_sends_to_it(owner: Executor) -> None:
    """Cancels and requests of more bytes than a socket holds: the sender goes on at once, and learns what became of them."""
    answers = queue.SimpleQueue()
    os.kill(owner._process.pid, signal.SIGSTOP)
    for _ in range(20):
        owner.submit(Request([1] * 100_000, 1), answers.put)
    assert owner._process.num_deaths == 0
    assert {answers.get(timeout=20).error_code for _ in range(20)} == {ErrorCode.INVALID_ARGUMENT}, (
        "the next engine's word"
    )


def test_an_engine_that_dies_again_and_again_is_given_up_and_all_are_told_so(owner: Executor, guest: Executor) -> None:
    owner._process._back_off._delay_s = 0.01
    answers = queue.SimpleQueue()
    told = []
    for _ in range(MAX_RESTARTS + 1):
        assert wait_until(lambda: owner.is_ready() and guest.is_ready(), 10) and not owner.has_given_up
        os.kill(owner._process.pid, signal.SIGSTOP)
        for executor in (owner, guest):
            executor.submit(Request([3, 4], 250), answers.put)
        os.kill(owner._process.pid, signal.SIGKILL)
        told.append([answers.get(timeout=10) for _ in range(2)])
    right = [3, 4, *oracle([3, 4], 250, 1000)]
    assert all(each.result.output_token_ids == [right] for each in sum(told[:-1], []))
    last = sorted(each.error_msg for each in told[-1])
    assert "has not come back" in last[1] and "restart the server" in last[0]
    assert owner.has_given_up and not owner.is_ready() and not guest.has_given_up
    with pytest.raises(EngineUnavailable, match="died 6 times .* restart the server"):
        owner.submit(Request([1], 1), answers.put)
    assert wait_until(lambda: not guest.is_ready(), 5) and answers.empty()
