"""What thousands of idle sessions cost: token ids in four bytes, and nothing of their last request."""

from __future__ import annotations

import gc
import tracemalloc

from backend.api import OutputConfig, SamplingConfig, SessionConfig
from tests.engine.driver import Driver, answer

WORDS = [[i % 900 + 1, 5, 6] for i in range(128)]
BIAS = {i: 0.5 for i in range(900)}


def turn(driver: Driver, session: int, prompt: list[int], **fields: object) -> int:
    request = driver.ask(prompt, 2, session=SessionConfig(session, start=driver.session(session) is None), **fields)
    driver.run()
    return request


def heavy(driver: Driver, session: int, prompt: list[int]) -> None:
    """A turn whose request is far larger than its conversation."""
    turn(
        driver,
        session,
        prompt,
        stop_words=[list(word) for word in WORDS],
        bad_words=[list(word) for word in WORDS],
        sampling_config=SamplingConfig(seed=session, logit_bias=dict(BIAS)),
        output_config=OutputConfig(return_log_probs=True),
    )
    driver.responses.clear()


def measure(driver: Driver, first: int, prompt: list[int]) -> tuple[int, int]:
    """Enter twenty sessions, half of them long: (bytes that they have taken, bytes that the table accounts for them)."""
    gc.collect()
    before, accounted = tracemalloc.get_traced_memory()[0], driver.core.sessions.num_bytes
    for session in range(first, first + 20):
        heavy(driver, session, [session, *prompt] if session % 2 else [session, 4])
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before, driver.core.sessions.num_bytes - accounted


def test_idle_sessions_hold_no_more_memory_than_the_table_accounts_for() -> None:
    driver = Driver(pool_tokens=2048, block_size=32, slots=1, max_num_tokens=4096, keep_trace=False)
    prompt = [i % 900 for i in range(1000)]
    tracemalloc.start()
    try:
        measure(driver, 1, prompt)  # pool, prefix trie and the worker are as full as they will be
        rounds = sorted(measure(driver, first, prompt) for first in (101, 201, 301))
    finally:
        tracemalloc.stop()
    used, accounted = rounds[1]  # threads that other tests left may allocate during one round
    assert accounted == 20 * 3392 + 4 * (10 * 1003 + 10 * 4) + 112 * (10 * 32 + 10)
    assert accounted / 3 < used <= accounted


def test_a_session_forgets_its_last_request_and_nothing_that_a_return_needs() -> None:
    driver = Driver()
    turn(driver, 1, [1, 2, 3], sampling_config=SamplingConfig(seed=9), stop_words=[[998, 999]])
    idle = driver.session(1)
    assert idle.token_ids.itemsize == 4 and not idle.request.stop_words and not idle.log_probs
    log = driver.log(1)
    again = turn(driver, 1, [4])
    assert driver.tokens(again) == answer([*log, 4], 2, seed=9, counter=2)


def test_the_least_recently_used_sessions_are_erased_beyond_the_bound_in_bytes() -> None:
    per_session = 3392 + 4 * 4 + 112  # one block of four tokens
    driver = Driver(max_session_bytes=3 * per_session)
    for session in range(1, 4):
        turn(driver, session, [session, 1])
    turn(driver, 2, [5])  # a longer conversation weighs more
    assert [driver.session(s) is not None for s in (1, 2, 3)] == [False, True, True]
    assert driver.core.sessions.num_bytes <= 3 * per_session


def test_a_running_turn_weighs_nothing_and_an_erased_session_is_taken_off_the_sum() -> None:
    driver = Driver()
    turn(driver, 1, [1, 2])
    assert driver.core.sessions.num_bytes == 3392 + 4 * 4 + 112
    driver.ask([3], 5, session=SessionConfig(1))
    assert driver.core.sessions.num_bytes == 0
    driver.run()
    driver.stop(1, end=True)
    assert driver.core.sessions.num_bytes == 0


def test_deadlines_of_finished_requests_do_not_pile_up() -> None:
    driver = Driver()
    for _ in range(1000):
        driver.ask([1, 2], 1)
        driver.run()
        driver.responses.clear()
    assert len(driver.core._deadlines) < 100
    late = driver.ask([1, 2], 40, timeout_s=1.0)
    for _ in range(200):  # the heap is rebuilt meanwhile
        driver.core.cancel(driver.ask([3], 1, timeout_s=900.0))
    driver.clock.advance(1.5)
    driver.run()
    assert driver.reason(late) == "TIMED_OUT"
