"""The histograms of the engine hold what happened, each value once."""

from __future__ import annotations

import math

from backend.api import SamplingConfig
from backend.api.distributions import BOUNDS, Distributions, Histogram
from backend.api.response import Interruption
from backend.replicas.totals import total_stats
from tests.engine.driver import Driver


def of(driver: Driver, name: str) -> Histogram:
    return driver.core.stats().distributions.histograms[name]


def count(driver: Driver, name: str) -> int:
    return sum(of(driver, name).counts)


def bucket(name: str, value: float) -> int:
    """The index of the bucket that holds a value, found the slow way."""
    return next((index for index, bound in enumerate(BOUNDS[name]) if value <= bound), len(BOUNDS[name]))


def test_a_value_lies_in_the_bucket_with_the_first_bound_that_is_not_below_it() -> None:
    counted = Distributions()
    for name, bounds in BOUNDS.items():
        assert list(bounds) == sorted(set(bounds))
        for value in (0.0, *bounds, *(bound + 1e-6 for bound in bounds), 1e308):
            counted.add(name, value)
        expected = [0] * (len(bounds) + 1)
        for value in (0.0, *bounds, *(bound + 1e-6 for bound in bounds), 1e308):
            expected[bucket(name, value)] += 1
        assert counted.histograms[name].counts == expected


def test_the_times_of_a_request_are_those_of_the_clock() -> None:
    driver = Driver()
    driver.ask([1, 2, 3], 3)
    driver.clock.advance(0.6)
    driver.step()  # admitted after 0.6 s, and its first token
    for gap_s in (0.03, 2.0):
        driver.clock.advance(gap_s)
        driver.step()
    told = {name: of(driver, name).total for name in BOUNDS if name.endswith("_s")}
    expected = {
        "first_token_s": 0.6,
        "between_tokens_s": 2.03,
        "per_token_s": 1.015,
        "total_s": 2.63,
        "queue_s": 0.6,
        "context_s": 0.0,
        "generation_s": 2.03,
        "run_s": 2.03,
    }
    assert told.keys() == expected.keys()
    assert all(math.isclose(told[name], value, abs_tol=1e-9) for name, value in expected.items()), told
    gaps = of(driver, "between_tokens_s").counts
    assert gaps[bucket("between_tokens_s", 0.03)] == 1 and gaps[bucket("between_tokens_s", 2.0)] == 1
    assert sum(gaps) == 2


def test_lengths_are_counted_once_for_each_request_and_tokens_once_for_each_step() -> None:
    driver = Driver(pool_tokens=256)
    driver.ask([1, 2, 3], 3)
    driver.ask([4, 5, 6, 7, 8], 2)
    driver.run()
    assert of(driver, "prompt_tokens").total == 8 and of(driver, "output_tokens").total == 5
    assert of(driver, "max_tokens").total == 5 and of(driver, "longest_output_tokens").total == 5
    assert [count(driver, name) for name in ("prompt_tokens", "output_tokens", "num_sequences", "total_s")] == [2] * 4
    assert of(driver, "step_tokens").total == 8 + 3 - 1 + 2 - 1, "the last token of each is never run"
    assert count(driver, "between_tokens_s") == 5 - 2, "one for each token behind the first"


def test_a_request_of_several_sequences_counts_once_with_its_longest() -> None:
    driver = Driver(pool_tokens=256)
    driver.ask([1, 2, 3], 4, sampling_config=SamplingConfig(num_return_sequences=3, seed=1))
    driver.run()
    assert count(driver, "prompt_tokens") == count(driver, "longest_output_tokens") == 1
    assert of(driver, "num_sequences").total == 3 and of(driver, "longest_output_tokens").total == 4
    assert count(driver, "output_tokens") == 3 and of(driver, "output_tokens").total == 12


def test_a_request_that_never_ran_has_no_times_but_its_whole() -> None:
    driver = Driver()
    cancelled = driver.ask([1], 3)
    driver.core.cancel(cancelled)
    driver.run()
    assert count(driver, "total_s") == 1
    assert [count(driver, name) for name in ("queue_s", "context_s", "first_token_s", "per_token_s")] == [0] * 4


def test_prompt_tokens_count_with_the_first_token_and_cached_ones_beside_them() -> None:
    driver = Driver(pool_tokens=256)
    driver.ask([1, 2, 3, 4, 5, 6, 7, 8], 2, cache_salt="a")
    assert driver.core.stats().counters.answered_prompt_tokens_total == 0
    driver.run()
    driver.ask([1, 2, 3, 4, 5, 6, 7, 8], 2, cache_salt="a")
    driver.run()
    counters = driver.core.stats().counters
    assert counters.answered_prompt_tokens_total == counters.queried_tokens_total == 16
    assert 0 < counters.answered_cached_tokens_total == counters.cached_tokens_total < 8


def test_a_pause_is_remembered_with_its_times_and_what_was_computed_again() -> None:
    driver = Driver(pool_tokens=32, slots=2, policy="max_utilization")
    driver.ask([1] * 8, 20)
    late = driver.ask([2] * 8, 20)
    while driver.core.has_work:
        driver.clock.advance(1)
        driver.step()
    account = driver.responses[late][-1].account
    assert account is not None and account.num_pauses and len(account.interruptions) == account.num_pauses
    for interruption in account.interruptions:
        assert isinstance(interruption, Interruption)
        assert account.first_scheduled_ns < interruption.paused_ns < interruption.returned_ns
        assert interruption.num_lost_tokens > 0 and interruption.recomputed_ns >= interruption.returned_ns
    assert account.num_evictions == account.num_pauses


def test_histograms_that_were_taken_do_not_change_any_more() -> None:
    driver = Driver()
    taken = driver.core.stats().distributions
    driver.ask([1, 2, 3], 2)
    driver.run()
    assert taken == Distributions() != driver.core.stats().distributions


def test_histograms_of_replicas_are_added_up() -> None:
    drivers = [Driver(), Driver()]
    for driver in drivers:
        driver.ask([1, 2, 3], 2)
        driver.run()
    one, both = drivers[0].core.stats(), total_stats([driver.core.stats() for driver in drivers])
    for name, histogram in one.distributions.histograms.items():
        assert sum(both.distributions.histograms[name].counts) == 2 * sum(histogram.counts), name
    assert both.distributions.histograms["prompt_tokens"].total == 6
