"""An engine whose owner has died while it was stopped: nobody ends it, and another one may listen at its address."""

from __future__ import annotations

from backend.api.processes.liveness import TICK_S
from backend.executor import Executor
from backend.executor.executor import LEAVE_MARGIN_S
from backend.executor.watch import Watch
from tests.executor.helpers import CONFIG, ScriptedTransport


class Remote(ScriptedTransport):
    def __init__(self) -> None:
        super().__init__(is_remote=True)
        self.num_reconnects = 0

    def reconnect(self) -> None:
        self.num_reconnects += 1


def ticks(executor: Executor, seconds: float) -> None:
    """The watch's own thread has been stopped."""
    assert executor._watch is not None
    for _ in range(round(seconds / TICK_S)):
        executor._watch.tick()
        executor._tick()


def attached() -> tuple[Executor, Remote]:
    transport = Remote()
    executor = Executor(transport)
    assert executor._watch is not None
    executor._watch.stop()
    executor._watch._thread.join()
    executor._beat(0.0)
    return executor, transport


def test_a_silent_engine_is_left_once_its_owner_would_have_ended_it_and_again_as_long_after_that() -> None:
    executor, transport = attached()
    patience_s = CONFIG.triton.watchdog_timeout_s + LEAVE_MARGIN_S
    ticks(executor, patience_s - 2 * TICK_S)
    assert transport.num_reconnects == 0
    ticks(executor, 3 * TICK_S)
    assert transport.num_reconnects == 1
    ticks(executor, patience_s - 2 * TICK_S)
    assert transport.num_reconnects == 1
    ticks(executor, 3 * TICK_S)
    assert transport.num_reconnects == 2


def test_patience_begins_anew_with_each_sign_of_life() -> None:
    executor, transport = attached()
    patience_s = CONFIG.triton.watchdog_timeout_s + LEAVE_MARGIN_S
    for _ in range(3):
        ticks(executor, patience_s - 2 * TICK_S)
        executor._beat(0.0)
    assert transport.num_reconnects == 0
    ticks(executor, patience_s + TICK_S)
    executor._beat(0.0)
    ticks(executor, patience_s + TICK_S)
    assert transport.num_reconnects == 2


def test_the_owner_of_an_engine_ends_it_and_leaves_it_never() -> None:
    class Owned:
        num_signs, patience_s, longest_turn_s, num_deaths, has_given_up, why_given_up = 1, 1.0, 9.0, 0, False, ""
        killed: list[str] = []

        def kill(self, reason: str, stuck_s: float) -> None:
            self.killed.append(reason)

        def stop(self) -> None: ...

    transport = Remote()
    executor = Executor(transport, Owned())
    assert isinstance(executor._watch, Watch)
    executor._watch.stop()
    executor._watch._thread.join()
    ticks(executor, 60)
    assert transport.num_reconnects == 0 and Owned.killed
