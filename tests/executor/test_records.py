"""Records of steps, as an Executor's program fetches them: of an engine in this process, and over a socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from backend.api import EngineUnavailable, Request
from backend.api.config.schema import RecordsConfig
from backend.api.stats import (
    BlocksCreated,
    BlocksStored,
    DebugTensors,
    IterationRequests,
    IterationStats,
    KvEvent,
    Records,
    RequestStage,
)
from backend.executor import Executor
from backend.executor.statistics_history import StatisticsHistory
from backend.wire.client import wait_until
from tests.executor.helpers import CONFIG, drain, engine, make_executor

RECORDING = msgspec.structs.replace(CONFIG, records=RecordsConfig(1000, 1000, 1000))


@pytest.fixture(params=["in this process", "over a socket"])
def executor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Executor]:
    if request.param == "in this process":
        with make_executor(RECORDING) as executor:
            yield executor
        return
    with (
        engine(tmp_path / "run" / "engine.sock", RECORDING),
        Executor.attach(str(tmp_path / "run" / "engine.sock"), 10) as executor,
    ):
        yield executor


@pytest.mark.feature("000-08", "000-09")
def test_the_records_of_a_request_are_there_with_its_final_response_and_are_fetched_once(executor: Executor) -> None:
    request_id = executor.enqueue_request(Request([1, 2, 3, 4, 5], 5))
    drain(executor, [request_id])
    steps, requests = executor.take_iteration_stats(), executor.take_request_stats()
    assert [step.iter for step in steps] == list(range(5)) == [step.iter for step in requests]
    stages = [stats.stage for step in requests for stats in step.requests]
    assert stages == [RequestStage.GENERATION] * 4 + [RequestStage.COMPLETE]
    assert executor.take_iteration_stats() == [] and executor.take_request_stats() == []


@pytest.mark.feature("000-61")
def test_events_of_the_cache_arrive_and_a_waiter_wakes_for_them(executor: Executor) -> None:
    events = []
    waiter = threading.Thread(target=lambda: events.extend(executor.take_kv_events(timedelta(seconds=30))))
    waiter.start()
    drain(executor, [executor.enqueue_request(Request([1, 2, 3, 4, 5], 1))])
    waiter.join()
    events += executor.take_kv_events()
    assert [event.event_id for event in events] == list(range(len(events)))
    stored = [
        block.token_ids for event in events if isinstance(event.data, BlocksStored) for block in event.data.blocks
    ]
    assert stored == [[1, 2, 3, 4]]


def test_the_first_event_tells_the_size_of_the_pool() -> None:
    with make_executor(RECORDING) as executor:
        drain(executor, [executor.enqueue_request(Request([1], 1))])
        assert executor.take_kv_events()[0].data == BlocksCreated(64)


def test_after_shutdown_nothing_can_be_fetched_and_nobody_waits() -> None:
    executor = make_executor()
    ended = threading.Event()
    waiter = threading.Thread(target=lambda: (executor.take_kv_events(None), ended.set()))
    waiter.start()
    executor.shutdown()
    assert ended.wait(10)
    for take in (
        executor.take_iteration_stats,
        executor.take_request_stats,
        executor.take_kv_events,
        executor.take_debug_tensors,
    ):
        with pytest.raises(EngineUnavailable, match="shut down"):
            take()


def test_nothing_is_kept_unless_the_configuration_asks_for_it() -> None:
    with make_executor() as executor:
        drain(executor, [executor.enqueue_request(Request([1, 2, 3, 4, 5], 2))])
        assert (executor.take_iteration_stats(), executor.take_request_stats(), executor.take_kv_events()) == (
            [],
            [],
            [],
        )


def test_of_debug_tensors_the_latest_steps_are_kept() -> None:
    shelf = StatisticsHistory()
    steps = [DebugTensors(number, {}) for number in range(5)]
    shelf.put(Records(debug_tensors=steps))
    assert shelf.take_debug_tensors() == []
    shelf.limit(RecordsConfig(max_debug_iterations=2))
    shelf.put(Records(debug_tensors=steps[:2]))
    shelf.put(Records(debug_tensors=steps[2:4]))
    shelf.put(Records(debug_tensors=steps[4:]))
    assert shelf.take_debug_tensors() == steps[3:]
    assert shelf.take_debug_tensors() == []


def test_each_kind_of_record_has_a_limit_of_its_own_and_the_latest_are_kept() -> None:
    shelf = StatisticsHistory()
    limits = RecordsConfig(
        max_iterations=1, max_request_iterations=2, max_kv_events=3, max_debug_iterations=4, debug_tensors=("a",)
    )
    shelf.limit(limits)
    steps = [IterationStats(iter=number) for number in range(6)]
    requests = [IterationRequests(number, []) for number in range(6)]
    events = [KvEvent(number, BlocksCreated(1)) for number in range(6)]
    tensors = [DebugTensors(number, {}) for number in range(6)]
    shelf.put(Records(iterations=steps, requests=requests, kv_events=events, debug_tensors=tensors))
    shelf.limit(limits)  # of the next engine: what the one before has told stays
    assert shelf.take_iterations() == steps[-1:]
    assert shelf.take_requests() == requests[-2:]
    assert shelf.take_kv_events(0) == events[-3:]
    assert shelf.take_debug_tensors() == tensors[-4:]


def test_a_waiter_wakes_when_an_event_comes() -> None:
    shelf, events = StatisticsHistory(), []
    shelf.limit(RecordsConfig(max_kv_events=1))
    waiter = threading.Thread(target=lambda: events.extend(shelf.take_kv_events(60.0)))
    waiter.start()
    assert wait_until(lambda: bool(shelf._changed._waiters), 10)
    shelf.put(Records(kv_events=[KvEvent(0, BlocksCreated(1))]))
    waiter.join(20)
    assert events == [KvEvent(0, BlocksCreated(1))]
