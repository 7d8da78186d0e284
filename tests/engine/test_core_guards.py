"""Comparisons and subtractions of the engine that are easily lost, because all goes well without them, nearly always."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from backend.api import EngineConfig, EngineStats, ErrorCode, Request, Response, SessionConfig
from backend.api.config.schema import KvCacheConfig
from backend.core.clock import ManualClock
from backend.core.messages import Command, StopSession, Submit
from backend.core.step import StepInput, StepOutput
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.wire.client import wait_until
from tests.engine.driver import Driver, answer
from tests.fakes.hash_worker import HashWorkerGroup


def test_a_reused_id_is_not_ended_at_the_deadline_of_its_first_use() -> None:
    driver = Driver()
    driver.ask([1, 2], 1, request_id=7, timeout_s=5.0)
    driver.run()
    driver.ask([3, 4], 6, request_id=7, timeout_s=500.0)
    driver.step()
    driver.clock.advance(10)
    driver.run()
    assert driver.reason(7) == "LENGTH" and driver.tokens(7)[1:] == answer([3, 4], 6)


def test_prompt_tokens_are_counted_once_however_long_the_conversation_is() -> None:
    driver = Driver()
    driver.turn(5, [1, 2, 3], 4, start=True)
    driver.run()
    driver.turn(5, [8, 9], 4)
    driver.run()
    assert driver.core.counters.prompt_tokens_total == 5


class SlowWorkerGroup(HashWorkerGroup):
    """Each step takes a second from when the one before it has ended."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(looks_ahead=True)
        self._clock = clock

    def collect(self) -> StepOutput:
        self._clock.advance(1.0)
        return super().collect()


def test_looking_ahead_the_time_of_a_step_does_not_count_the_step_before_it() -> None:
    clock = ManualClock()
    core = EngineCore(EngineConfig(kv_cache=KvCacheConfig(max_tokens=1024)), SlowWorkerGroup(clock), clock)
    core.enqueue(1, Request([1, 2], 6))
    latencies_ms = []
    while core.has_work:
        core.step()
        latencies_ms.append(core.latest_iteration().iter_latency_ms)
    assert set(latencies_ms[1:]) == {1000.0}, "the first call launches only"


class Loop:
    """Runs an EngineLoop; a response makes the next command, on the loop's own thread, so that the order is certain."""

    def __init__(self, next_command: Callable[[Response], Command | None]) -> None:
        core = EngineCore(EngineConfig(kv_cache=KvCacheConfig(max_tokens=1024)), HashWorkerGroup())
        self.loop = EngineLoop(core)
        self.next_command = next_command
        self.responses: list[Response] = []

    def deliver(self, responses: list[Response]) -> None:
        for response in responses:
            self.responses.append(response)
            command = self.next_command(response)
            if command is not None:
                self.loop.post(command)

    def run(self, *commands: Command) -> None:
        for command in commands:
            self.loop.post(command)
        self.loop.stop(drain=True)
        self.loop.run(self.deliver)

    def error_of(self, request_id: int) -> str | None:
        return next(r.error_or_none for r in self.responses if r.request_id == request_id and r.is_final)


def turn(request_id: int, **session: bool) -> Submit:
    return Submit(request_id, Request([1, 2], 2, session=SessionConfig(5, **session)))


def test_the_next_turn_of_a_session_is_no_conflict_while_somebody_else_runs() -> None:
    """The loop polls in every turn, not only when it has slept: two polls are two moments."""
    loop = Loop(lambda response: turn(2) if response.request_id == 1 else None)
    loop.run(Submit(9, Request([7], 100)), turn(1, start=True))
    assert loop.error_of(2) is None and loop.error_of(9) is None


def test_two_turns_of_a_session_that_arrive_together_are_a_conflict() -> None:
    loop = Loop(lambda response: None)
    loop.run(turn(1, start=True), turn(2))
    assert "conflict" in loop.error_of(2)


def test_a_session_is_stopped_under_the_namespace_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []
    monkeypatch.setattr(EngineCore, "stop_session", lambda self, *arguments: stopped.append(arguments))
    Loop(lambda response: None).run(StopSession(3, 5, True, "tenant"))
    assert stopped == [(3, 5, True, "tenant")]


def make_loop(seen: list[int | None]) -> EngineLoop:
    """A loop that notes in which turn each of its steps was."""

    class Spy(HashWorkerGroup):
        def submit(self, step: StepInput) -> None:
            seen.append(loop.present_iteration)
            super().submit(step)

    loop = EngineLoop(EngineCore(EngineConfig(kv_cache=KvCacheConfig(max_tokens=1024)), Spy()))
    return loop


def test_each_step_is_in_a_turn_of_its_own() -> None:
    seen: list[int | None] = []
    loop = make_loop(seen)
    loop.post(Submit(1, Request([1], 5)))
    loop.stop(drain=True)
    loop.run(lambda responses: None)
    assert None not in seen and len(seen) == 5 and sorted(set(seen)) == seen


def test_a_loop_that_sleeps_is_in_no_turn() -> None:
    """Or an idle engine would be killed for its long step."""
    seen: list[int | None] = []
    loop = make_loop(seen)
    thread = threading.Thread(target=loop.run, args=[lambda responses: None], daemon=True)
    thread.start()
    for number in (1, 2):
        loop.post(Submit(number, Request([1], 5)))
        assert wait_until(lambda tokens=5 * number: len(seen) == tokens and loop.present_iteration is None, 5)
    loop.stop()
    thread.join()
    assert loop.present_iteration is None


def test_a_loop_that_is_stopped_answers_everybody_who_is_live() -> None:
    loop = Loop(lambda response: None)
    for request_id in (1, 2):
        loop.loop.post(Submit(request_id, Request([1], 100)))
    loop.loop.stop()
    loop.loop.run(loop.deliver)
    assert [(r.request_id, r.error_code) for r in loop.responses] == [(i, ErrorCode.UNAVAILABLE) for i in (1, 2)]


def test_statistics_are_published_once_in_a_period_however_many_steps_it_has() -> None:
    core = EngineCore(EngineConfig(kv_cache=KvCacheConfig(max_tokens=1024)), HashWorkerGroup())
    published: list[EngineStats] = []
    loop = EngineLoop(core, stats_period_s=1000.0)
    loop.post(Submit(1, Request([1], 20)))
    loop.stop(drain=True)
    loop.run(lambda responses: None, published.append)
    assert len(published) == 1
