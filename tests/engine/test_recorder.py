"""Records of single steps: statistics, and the requests in each."""

from __future__ import annotations

from collections import deque

import pytest

from backend.api.config.schema import RecordsConfig
from backend.api.stats import DebugTensors, RequestStage, RequestStats
from tests.engine.driver import Driver


def recording(max_iterations: int = 100, max_request_iterations: int = 100, **options: object) -> Driver:
    return Driver(records=RecordsConfig(max_iterations, max_request_iterations), **options)


@pytest.mark.feature("000-08")
def test_every_step_has_a_record_and_they_are_handed_over_once() -> None:
    driver = recording()
    driver.ask([1, 2, 3], 5)
    driver.run()
    records = driver.core.take_records()
    assert [step.iter for step in records.iterations] == list(range(5))
    assert [step.num_context_requests for step in records.iterations] == [1, 0, 0, 0, 0]
    assert [step.num_gen_requests for step in records.iterations] == [0, 1, 1, 1, 1]
    assert [step.num_completed_requests for step in records.iterations] == [0, 0, 0, 0, 1]
    assert [step.num_new_active_requests for step in records.iterations] == [1, 0, 0, 0, 0]
    assert driver.core.take_records() is None


def test_the_time_in_the_queue_is_told_with_the_step_that_ends_it() -> None:
    driver = recording()
    driver.ask([1, 2], 2)
    driver.clock.advance(0.25)
    driver.ask([3, 4], 2)
    driver.clock.advance(0.5)
    driver.run()
    first, second = driver.core.take_records().iterations
    assert first.new_active_requests_queue_latency_ms == pytest.approx(750 + 500)
    assert (first.num_new_active_requests, second.new_active_requests_queue_latency_ms) == (2, 0.0)


@pytest.mark.feature("000-09")
def test_a_request_goes_through_its_stages_from_step_to_step() -> None:
    driver = recording(slots=1, max_num_tokens=2)
    first, second = driver.ask([1, 2, 3], 2), driver.ask([4], 1)
    driver.run()
    steps = [{stats.request_id: stats for stats in step.requests} for step in driver.core.take_records().requests]
    queued, context, generation, complete = RequestStage
    assert [step[first].stage for step in steps[:3]] == [context, generation, complete]
    assert [step[second].stage for step in steps] == [queued, queued, queued, complete]
    assert steps[0][first] == RequestStats(first, context, num_computed_tokens=2, is_scheduled=True, num_new_blocks=1)
    assert (steps[1][first].num_computed_tokens, steps[1][first].num_output_tokens) == (3, 1)
    assert not steps[0][second].is_scheduled
    assert first not in steps[3]


def test_paused_requests_are_told_as_such() -> None:
    driver = recording(pool_tokens=24, policy="max_utilization", reuse=False)
    driver.ask([1] * 8, 12)
    late = driver.ask([2] * 8, 12)
    driver.run()
    paused = [s for step in driver.core.take_records().requests for s in step.requests if s.is_paused]
    assert {stats.request_id for stats in paused} == {late}
    assert {stats.stage for stats in paused} == {RequestStage.QUEUED}


def test_only_what_is_asked_for_is_kept_and_of_it_the_newest() -> None:
    driver = recording(max_iterations=2, max_request_iterations=0)
    driver.ask([1], 5)
    driver.run()
    records = driver.core.take_records()
    assert [step.iter for step in records.iterations] == [3, 4] and records.requests == []
    silent = recording(0, 0)
    silent.ask([1], 3)
    silent.run()
    assert silent.core.take_records() is None


def test_who_returns_from_a_pause_is_not_new_again() -> None:
    driver = recording(pool_tokens=24, policy="max_utilization", reuse=False)
    driver.ask([1] * 8, 12)
    driver.ask([2] * 8, 12)
    while driver.core.has_work:
        driver.clock.advance(0.01)
        driver.step()
    assert driver.core.counters.pauses_total
    assert sum(step.num_new_active_requests for step in driver.core.take_records().iterations) == 2


class Sink:
    """A KvEventSink, beside which the cache keeps all its events."""

    def start(self, block_size: int) -> None: ...

    def offer(self, events: object, prefixes: object) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("sink", [None, Sink()])
def test_of_too_many_events_the_latest_are_kept_and_each_is_handed_over_once(sink: Sink | None) -> None:
    def taken(max_kv_events: int) -> list[list[int]]:
        records = RecordsConfig(max_kv_events=max_kv_events)
        driver = Driver(records=records, pool_tokens=200, max_num_tokens=8, kv_events=sink)
        ids = []
        for token in (1, 2):
            driver.ask([token] * 41, 2)
            driver.run()
            ids.append([event.event_id for event in driver.core.take_records().kv_events])
        assert driver.core.take_records() is None
        return ids

    every = taken(1000)
    assert [number for ids in every for number in ids] == list(range(sum(map(len, every))))
    assert min(map(len, every)) > 2 and taken(2) == [ids[-2:] for ids in every]


def test_tokens_of_the_output_are_no_tokens_of_the_prompt() -> None:
    driver = recording()
    request = driver.ask([1, 2, 3], 5)
    driver.run()
    told = [stats for step in driver.core.take_records().requests for stats in step.requests]
    assert {stats.request_id for stats in told} == {request}
    assert [stats.num_computed_tokens for stats in told] == [3] * 5


def test_debug_tensors_are_handed_over_once() -> None:
    driver = recording()
    recorder = driver.core._recorder
    recorder._debug_tensors = deque([DebugTensors(4, {})], maxlen=2)
    assert [each.iter for each in recorder.take().debug_tensors] == [4]
    assert recorder.take() is None
