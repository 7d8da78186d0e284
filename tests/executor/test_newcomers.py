"""New requests while the engine process is started again: they wait for it, a bounded number of them for a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from backend.api import EngineUnavailable, ErrorCode, Request
from backend.api.config.schema import LimitsConfig, TritonConfig
from backend.core.messages import CLIENT_SHIFT, Submit
from backend.executor import Executor
from backend.executor.pause import Pauses
from backend.executor.replay import Replay
from tests.crashes.test_rules import hello
from tests.executor.helpers import POOL
from tests.executor.test_replay import Heard, kill, stream
from tests.fakes.hash_worker import oracle

WAITS = msgspec.structs.replace(POOL, triton=TritonConfig(hold_new_s=60))


def kill_for_a_while(owner: Executor) -> None:
    """No engine is there for the next seconds."""
    owner._process._back_off._delay_s = 1.5
    kill(owner)


@pytest.mark.feature("002-34")
def test_a_request_that_comes_while_no_engine_is_there_waits_for_the_next_one(launch: Callable[..., Executor]) -> None:
    owner = launch(WAITS)
    running = Heard(owner, stream([1, 7], 300))
    running.wait(3)
    kill_for_a_while(owner)
    assert owner.can_enqueue_requests() and not owner.is_ready()
    late = [Heard(owner, stream([i, 5], 20)) for i in range(3)]
    assert [each.tokens() for each in late] == [oracle([i, 5], 20, 1000) for i in range(3)]
    assert running.tokens() == oracle([1, 7], 300, 1000)
    assert owner.pauses.resumed_requests == 1, "a new one is not resumed"


def test_one_that_is_cancelled_while_it_waits_ends(launch: Callable[..., Executor]) -> None:
    owner = launch(WAITS)
    kill_for_a_while(owner)
    late = Heard(owner, stream([1, 5], 5000))
    owner.cancel_request(late.request_id)
    assert late.done.wait(60)


def test_who_does_not_want_newcomers_to_wait_has_them_refused(launch: Callable[..., Executor]) -> None:
    owner = launch(msgspec.structs.replace(POOL, triton=TritonConfig(hold_new_s=0)))
    kill_for_a_while(owner)
    assert not owner.can_enqueue_requests()
    with pytest.raises(EngineUnavailable, match="not ready yet"):
        owner.submit(stream([1, 2]), lambda response: None)


class Pause:
    """A Replay without an engine, as Executors have it during a pause."""

    def __init__(self) -> None:
        self.replay, self.heard = Replay(), []
        assert self.replay.greet(hello(1)) == []

    def add(self, number: int, request: Request, now_s: float = 0.0) -> int:
        request_id = 1 << CLIENT_SHIFT | number
        self.replay.add(request_id, self.heard.append, Submit(request_id, request), now_s, is_held=True)
        return request_id

    def sent(self) -> list[Submit]:
        assert self.replay.greet(hello(2)) == []
        found = list(self.replay.again(1.0))
        self.replay.let_go(1.0)
        return found


def test_newcomers_have_their_first_life_with_the_next_engine_and_are_not_blamed_for_the_last() -> None:
    pause = Pause()
    pause.add(1, stream([1, 2, 3]))
    assert pause.replay.newcomers() == (1, 3) and pause.replay.held_s(2.0) == 2.0
    (submit,) = pause.sent()
    assert submit.resume is not None and not submit.resume.is_again, "the limits of the queue hold for it"
    (live,) = pause.replay._live.values()
    assert (live.num_crashes, live.num_lives, live.is_held) == (0, 1, False)
    assert pause.replay.newcomers() == (0, 0)


def test_those_that_have_waited_for_too_long_are_named() -> None:
    pause = Pause()
    first = pause.add(1, stream([1]), now_s=0.0)
    pause.add(2, stream([1]), now_s=9.0)
    assert pause.replay.overdue(10.0, 5.0) == [first]
    pause.sent()
    assert pause.replay.overdue(100.0, 5.0) == [], "they run"


def test_as_many_wait_as_the_queue_of_the_engine_holds(launch: Callable[..., Executor]) -> None:
    owner = launch(msgspec.structs.replace(WAITS, limits=LimitsConfig(max_queue_size=2)))
    kill_for_a_while(owner)
    heard = [Heard(owner, stream([i, 2], 5)) for i in range(2)]
    with pytest.raises(EngineUnavailable, match="2 new requests wait for the engine"):
        owner.submit(stream([1, 2]), lambda response: None)
    assert [each.tokens() for each in heard] == [oracle([i, 2], 5, 1000) for i in range(2)]


def test_one_that_waits_for_too_long_gets_unavailable(launch: Callable[..., Executor]) -> None:
    owner = launch(msgspec.structs.replace(POOL, triton=TritonConfig(hold_new_s=0.1)))
    kill_for_a_while(owner)
    late = Heard(owner, stream([1, 5], 20))
    assert late.done.wait(60)
    assert late.responses[-1].error_code is ErrorCode.UNAVAILABLE and "not ready yet" in late.responses[-1].error_msg


class Abandoned:
    """The transport of an engine that will not come back."""

    is_remote = True

    def is_abandoned(self) -> bool:
        return True


def test_one_that_came_during_the_pause_is_not_told_that_the_engine_ended_while_it_ran() -> None:
    pause, told = Pause(), {}
    pauses = Pauses(
        pause.replay, threading.Lock(), Abandoned(), None, lambda each: told.update({each.request_id: each})
    )
    pauses._config = msgspec.structs.replace(POOL, triton=TritonConfig(hold_new_s=60))
    running = 1 << CLIENT_SHIFT | 1
    pause.replay.add(running, pause.heard.append, Submit(running, stream([1, 2])), time.monotonic())
    pause.replay.hold(time.monotonic())
    new = pause.add(2, stream([1, 2]), time.monotonic())
    pauses.look()
    assert "ended while the request ran" in told[running].error_msg
    assert "not ready yet" in told[new].error_msg and told[new].error_code is ErrorCode.UNAVAILABLE
    assert pause.replay.held_s(time.monotonic()) == 0.0, "the next pause is counted from its own beginning"
    assert pause.replay.counts.pauses == 1
