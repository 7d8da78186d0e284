"""`triton.stream_interval_ms`: tokens that come sooner after a response than that share the next one; nothing else changes."""

from __future__ import annotations

import pytest

from backend.api import OutputConfig
from tests.engine.driver import Driver, answer


def sizes(driver: Driver, request_id: int) -> list[int]:
    """How many tokens each response told."""
    return [len(response.result.output_token_ids[0]) for response in driver.responses[request_id]]


def paced(driver: Driver, steps: int, step_s: float) -> None:
    for _ in range(steps):
        driver.clock.advance(step_s)
        driver.step()


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_the_first_token_leaves_at_once_and_later_ones_together(looks_ahead: bool) -> None:
    """Steps of 10 ms under an interval of 35 ms: token 1 at once, then the four that have come 40 ms later, and so on. Of ten
    tokens the last one is left for the end: 1 + 4 + 4 + 1.
    """
    driver = Driver(stream_interval_ms=35, looks_ahead=looks_ahead)
    request = driver.ask([1, 2, 3], 10)
    paced(driver, 12, 0.010)
    assert sizes(driver, request) == [1, 4, 4, 1]
    assert driver.tokens(request) == answer([1, 2, 3], 10)


@pytest.mark.parametrize(
    ("interval_ms", "step_s", "streaming", "expected"),
    [(35, 0.040, True, [1] * 6), (0, 0.001, True, [1] * 6), (35, 0.010, False, [6])],
    ids=["slower than the interval", "no interval", "no stream"],
)
def test_only_tokens_of_a_stream_that_come_sooner_share_a_response(
    interval_ms: int, step_s: float, streaming: bool, expected: list[int]
) -> None:
    driver = Driver(stream_interval_ms=interval_ms)
    output = OutputConfig(exclude_input_from_output=True)
    request = driver.ask([1, 2, 3], 6, streaming=streaming, output_config=output)
    paced(driver, 6, step_s)
    assert sizes(driver, request) == expected


def test_all_streams_are_told_together() -> None:
    """Steps of 10 ms under an interval of 35 ms: all are told in steps 1, 5 and 9. The second stream comes behind step 2.
    Its first token leaves in step 3 at once, those of steps 4 and 5 in step 5, with the first stream's four.
    """
    driver = Driver(stream_interval_ms=35)
    first = driver.ask([1, 2, 3], 20)
    paced(driver, 2, 0.010)
    second = driver.ask([4, 5], 20)
    paced(driver, 7, 0.010)
    assert sizes(driver, first) == [1, 4, 4]
    assert sizes(driver, second) == [1, 2, 4]


def test_log_probabilities_stay_with_their_tokens() -> None:
    driver = Driver(stream_interval_ms=35)
    request = driver.ask([1, 2, 3], 6, output_config=OutputConfig(return_log_probs=True))
    paced(driver, 6, 0.010)
    assert [len(response.result.log_probs[0]) for response in driver.responses[request]] == sizes(driver, request)
    assert sizes(driver, request) == [1, 4, 1]


def test_what_is_held_back_leaves_with_a_pause() -> None:
    """A pool of 4 blocks of 4 cells under two streams that grow: the younger one is paused, and is told what it has by then,
    though its interval is not over; nobody knows when it goes on.
    """
    driver = Driver(pool_tokens=16, policy="max_utilization", stream_interval_ms=1000)
    driver.ask([1, 2, 3], 9)
    younger = driver.ask([4, 5, 6], 9)
    while not any(seq.num_pauses for seq in driver.core.scheduler.waiting):
        paced(driver, 1, 0.001)
    (seq,) = driver.core.scheduler.waiting
    assert len(driver.tokens(younger)) == seq.num_output_tokens > 1
    driver.run()
    assert driver.tokens(younger) == answer([4, 5, 6], 9)
