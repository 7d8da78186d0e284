"""What the engine says of its latest step and of itself."""

from __future__ import annotations

import pytest

from backend.api import Request
from backend.api.request import KvOrigin
from backend.core.clock import ManualClock
from backend.core.messages import Delivered, Resume
from backend.core.step import MemoryUse, StepInput
from backend.engine.statistics import Statistics
from backend.engine.steps_in_flight import StepInFlight
from backend.scheduler.plan import StepPlan
from tests.engine.driver import VOCAB, Driver


def test_the_latest_iteration_is_told_with_the_gauges_of_the_present() -> None:
    driver = Driver(max_num_tokens=8)
    assert (driver.core.latest_iteration().timestamp_ns, driver.core.latest_iteration().max_num_active_requests) == (
        0,
        4,
    )
    driver.ask([1, 2, 3], 5)
    driver.step()
    driver.ask([4] * 20, 5)
    driver.clock.advance(2)
    driver.step()
    latest = driver.core.latest_iteration()
    assert (latest.iter, latest.num_gen_requests, latest.num_context_requests, latest.num_ctx_tokens) == (1, 1, 1, 7)
    assert latest.num_scheduled_requests == latest.num_active_requests == 2
    assert latest.timestamp_ns == driver.clock.time_ns()
    driver.clock.advance(3)
    assert driver.core.latest_iteration().timestamp_ns == latest.timestamp_ns, "when the step ended, not when one asks"


def test_requests_that_ended_are_counted_in_the_step_after_which_they_had() -> None:
    driver = Driver()
    driver.ask([1], 1)
    driver.ask([2], 2)
    completed = []
    while driver.core.has_work:
        driver.step()
        completed.append(driver.core.latest_iteration().num_completed_requests)
    assert completed == [1, 1]


def test_statistics_that_were_taken_do_not_change_any_more() -> None:
    driver = Driver()
    driver.ask([1], 1)
    driver.run()
    taken = driver.core.stats().counters
    driver.ask([2], 1)
    driver.run()
    assert (taken.generated_tokens_total, taken.requests_finished_total) == (1, {"LENGTH": 1})
    assert driver.core.stats().counters.requests_finished_total == {"LENGTH": 2}


@pytest.mark.feature("002-30")
def test_active_and_queued_requests_and_the_size_of_the_batch_are_told() -> None:
    driver = Driver(slots=2)
    for request in range(5):
        driver.ask([request], 3)
    waiting = driver.core.stats().latest
    assert (waiting.num_active_requests, waiting.num_queued_requests, waiting.num_scheduled_requests) == (5, 5, 0)
    driver.step()
    running = driver.core.stats().latest
    assert (running.num_active_requests, running.num_queued_requests, running.num_scheduled_requests) == (5, 3, 2)
    driver.run()
    idle = driver.core.stats().latest
    assert (idle.num_active_requests, idle.num_queued_requests, idle.num_scheduled_requests) == (0, 0, 0)


def test_every_final_response_of_an_accepted_request_carries_the_engines_books() -> None:
    driver = Driver()
    ended = driver.ask([1, 2, 3], 4)
    driver.step()
    driver.clock.advance(0.5)
    driver.step(2)
    cancelled = driver.ask([4], 9)
    driver.core.cancel(cancelled)
    driver.run()
    *before, last = driver.responses[ended]
    assert [response.account for response in before] == [None] * len(before) and last.result.perf_metrics is None
    assert last.account is not None and last.account.num_output_tokens == 4
    assert last.account.last_token_ns - last.account.first_token_ns == 500_000_000
    (never_ran,) = driver.responses[cancelled]
    assert never_ran.account is not None and (never_ran.account.arrival_ns, never_ran.account.first_scheduled_ns) == (
        driver.clock.monotonic_ns(),
        0,
    )


def test_the_books_of_a_request_that_failed_come_with_its_error_and_those_of_a_refused_one_do_not() -> None:
    driver = Driver()
    failed = driver.ask([1, 2, 3], 4)
    driver.step(2)
    driver.workers.fail_next = RuntimeError("device")
    driver.step()
    refused = driver.ask([VOCAB], 4)
    assert driver.responses[failed][-1].has_error() and driver.responses[failed][-1].account.num_output_tokens == 2
    assert driver.responses[refused][-1].has_error() and driver.responses[refused][-1].account is None


def test_what_is_generated_and_in_no_response_is_counted_as_discarded() -> None:
    driver = Driver()
    text = driver.ask([1, 2, 3], 9)
    driver.step(5)
    driver.core.cancel(text, keep_output_tokens=3)
    unary = driver.ask([4, 5], 9, streaming=False)
    driver.step(2)
    driver.workers.fail_next = RuntimeError("device")
    driver.step()
    assert driver.responses[unary][-1].has_error()
    counters = driver.core.stats().counters
    assert (counters.generated_tokens_total, counters.discarded_tokens_total) == (5 + 2, 2 + 2)
    assert counters.requests_finished_total == {"STOP_WORDS": 1, "ERROR": 1}


def test_accepted_requests_are_those_that_ended_and_those_in_flight() -> None:
    driver = Driver(slots=2)
    for request in range(6):
        driver.ask([request], 2 + request)
    driver.ask([VOCAB], 1)
    while driver.core.has_work:
        driver.step()
        stats = driver.core.stats()
        in_flight = stats.latest.num_active_requests
        assert (
            stats.counters.requests_accepted_total == sum(stats.counters.requests_finished_total.values()) + in_flight
        )
    assert (stats.counters.requests_accepted_total, stats.counters.requests_rejected_total) == (6, 1)


def test_memory_is_asked_for_after_a_step_and_not_while_the_engine_is_idle() -> None:
    driver = Driver()
    sizes = iter(range(1, 100))
    driver.workers.memory_use = lambda: MemoryUse(next(sizes), 7)

    def told() -> tuple[int, int]:
        latest = driver.core.stats().latest
        return latest.cpu_memory_bytes, latest.gpu_memory_bytes

    assert [told(), told()] == [(1, 7), (1, 7)]
    driver.ask([1], 1)
    driver.run()
    assert [told(), told()] == [(2, 7), (2, 7)]


def test_an_engine_is_known_by_the_moment_it_was_made() -> None:
    driver = Driver()
    made_ns = driver.clock.monotonic_ns()
    driver.clock.advance(3)
    assert driver.core.stats().started_ns == made_ns and driver.core.stats().uptime_s == 3.0


def test_times_of_a_request_that_another_engine_had_begun_count_from_when_the_server_accepted_it() -> None:
    driver = Driver()
    driver.clock.advance(20)
    now_ns = driver.clock.monotonic_ns()
    resume = Resume(
        [Delivered([4, 5])], first_token_ns=now_ns - 9_000_000_000, arrival_ns=now_ns - 9_500_000_000, is_again=True
    )
    driver.core.enqueue(1, Request([1, 2, 3], 6, streaming=True), resume=resume)
    driver.run()
    account = driver.responses[1][-1].account
    assert account is not None
    assert account.first_token_ns - account.arrival_ns == 500_000_000
    assert account.arrival_ns <= account.first_scheduled_ns <= account.first_token_ns <= account.last_token_ns
    assert driver.core.statistics.first_token_s[-1] == 0.5


def test_a_request_that_ends_before_it_is_queued_counts_as_accepted_and_as_ended() -> None:
    statistics = Statistics(ManualClock())
    for _ in range(2):
        statistics.count_unqueued("CANCELLED")
    counters = statistics.counters
    assert (counters.requests_accepted_total, counters.requests_finished_total) == (2, {"CANCELLED": 2})


@pytest.mark.parametrize("name", ["translate", ""])
def test_sequences_of_an_adapter_are_counted_under_its_name_or_else_its_number(name: str) -> None:
    driver = Driver(slots=1)
    origin = KvOrigin(lora_id=3, lora_name=name)
    for token in range(3):
        driver.ask([token], 4)
    driver.step()
    for seq in (*driver.core.scheduler.waiting, *driver.core.scheduler.running):
        seq.kv_origin, seq.adapter = origin, "content"
    stats = driver.core.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == ({name or "3": 1}, {name or "3": 2})


def test_a_step_that_was_submitted_early_lasts_from_the_end_of_the_one_before() -> None:
    driver = Driver()
    statistics, clock = driver.core.statistics, driver.clock
    flight = StepInFlight(StepPlan(driver.core.kv.plan()), StepInput(7, []), clock.monotonic_ns())
    clock.advance(2.0)
    assert statistics.record(flight) == 2.0
    clock.advance(0.5)
    assert statistics.record(flight) == 0.5
