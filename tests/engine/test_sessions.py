"""Sessions: one sequence over many turns (docs/features.md, 004)."""

from __future__ import annotations

import logging
import random

import pytest

from backend.api import OutputConfig, Request, SessionConfig
from backend.api.config.schema import SessionsConfig
from backend.core.sequence import Status
from backend.engine.sessions import idle_bytes
from tests.engine.driver import Driver, answer


def converse(driver: Driver, session: int, turns: list[list[int]], max_tokens: int = 4) -> list[list[int]]:
    replies = []
    for index, prompt in enumerate(turns):
        request = driver.turn(session, prompt, max_tokens, start=index == 0)
        driver.run()
        replies.append(driver.tokens(request))
    return replies


def expected_replies(turns: list[list[int]], max_tokens: int = 4) -> list[list[int]]:
    history: list[int] = []
    replies, counter = [], 0
    for prompt in turns:
        history += prompt
        replies.append(answer(history, max_tokens, counter=counter))
        history += replies[-1]
        counter += max_tokens
    return replies


@pytest.mark.feature("004-05", "004-12", "004-34")
def test_a_warm_turn_runs_its_new_tokens_and_the_last_sampled_one() -> None:
    driver = Driver()
    turns = [[1, 2, 3, 4, 5], [6, 7, 8]]
    converse(driver, 1, turns[:1])
    before = driver.core.counters.context_tokens_total
    request = driver.turn(1, turns[1], 4)
    driver.run()
    # the last token of turn 1 was sampled and never run: no step had needed its KV
    assert driver.core.counters.context_tokens_total - before == 3 + 1
    assert driver.tokens(request) == expected_replies(turns)[1]
    assert driver.core.counters.recomputed_tokens_total == 0


@pytest.mark.feature("004-10", "004-13", "004-14", "004-18")
def test_the_least_recently_used_session_is_evicted_and_comes_back_unchanged() -> None:
    driver = Driver(pool_tokens=48, block_size=4, reuse=False)  # room for three sessions of 16
    turns = {name: [[10 * name + i for i in range(8)], [10 * name]] for name in (1, 2, 3, 4)}
    for name in (1, 2, 3):
        converse(driver, name, turns[name][:1])
    driver.turn(1, [5], 0)  # touch 1: now 2 is the least recently used
    driver.run()
    lost = lambda name: driver.core.kv.num_evicted_blocks(driver.session(name))
    converse(driver, 4, turns[4][:1])
    assert lost(2) > 0 and lost(1) == lost(3) == 0
    assert driver.log(2)[:8] == turns[2][0], "the token ids are kept"
    request = driver.turn(2, turns[2][1], 4)
    driver.run()
    assert driver.tokens(request) == expected_replies(turns[2])[1]
    assert driver.core.counters.recomputed_tokens_total > 0


@pytest.mark.feature("004-15")
def test_100_sessions_on_room_for_4_cannot_tell() -> None:
    driver = Driver(pool_tokens=4 * 64, block_size=4)
    rng = random.Random(0)
    turns = {s: [[rng.randrange(1000) for _ in range(8)] for _ in range(5)] for s in range(100)}
    replies: dict[int, list[list[int]]] = {s: [] for s in turns}
    for index in range(5):
        for session in turns:
            request = driver.turn(session, turns[session][index], 4, start=index == 0)
            driver.run()
            replies[session].append(driver.tokens(request))
    assert replies == {s: expected_replies(turns[s]) for s in turns}
    assert driver.core.counters.sequences_evicted_total == 400


@pytest.mark.feature("004-11")
def test_sequences_in_use_are_never_evicted_by_others() -> None:
    driver = Driver(pool_tokens=32, block_size=4, slots=4)
    running = [driver.ask([i] * 8, 9) for i in (1, 2)]  # each needs 4 of 8 blocks
    waiting = driver.ask([3] * 8, 9)
    driver.step(3)
    assert waiting not in driver.responses
    driver.run()
    for i, request in zip((1, 2, 3), [*running, waiting], strict=True):
        assert driver.tokens(request) == answer([i] * 8, 9)
    assert driver.core.counters.pauses_total == 0 and driver.core.counters.recomputed_tokens_total == 0


@pytest.mark.feature("004-29")
def test_step_rewinds_and_a_step_beyond_the_end_is_clamped() -> None:
    driver = Driver()
    (first,) = converse(driver, 1, [[1, 2, 3]])
    rewound = driver.turn(1, [9], 4, step=2)
    driver.run()
    assert driver.tokens(rewound) == answer([1, 2, 9], 4, counter=4)
    history = [1, 2, 9, *driver.tokens(rewound)]
    clamped = driver.turn(1, [8], 4, step=1000)
    driver.run()
    assert driver.tokens(clamped) == answer([*history, 8], 4, counter=8)
    assert len(first) == 4


def test_a_whole_conversation_keeps_the_common_prefix() -> None:
    driver = Driver(reuse=False)
    (reply,) = converse(driver, 1, [[1, 2, 3, 4, 5, 6]])
    conversation = [1, 2, 3, 4, 5, 6, *reply, 7]
    before = driver.core.counters.context_tokens_total
    request = driver.turn(1, conversation, 4, full_history=True)
    driver.run()
    assert driver.tokens(request) == answer(conversation, 4, counter=4)
    assert driver.core.counters.context_tokens_total - before == 2
    other = driver.turn(1, [1, 2, 3, 99], 4, full_history=True)
    driver.run()
    assert driver.tokens(other) == answer([1, 2, 3, 99], 4, counter=8)
    assert driver.session(1).num_tokens == 8


@pytest.mark.feature("004-30")
def test_every_refusal_has_its_code() -> None:
    driver = Driver()
    assert "session error 1 (invalid)" in driver.error(driver.turn(1, [1], 4))
    driver.turn(2, [1], 50, start=True)
    driver.step()
    assert "session error 3 (busy)" in driver.error(driver.turn(2, [1], 4))
    driver.stop(2)
    assert "session error 4 (inactive)" in driver.error(driver.stop(2))
    assert "session error 1 (invalid)" in driver.error(driver.stop(77))
    too_long = driver.turn(2, [1] * 30, 4, session_len=20)
    assert "session error 6 (too_long)" in driver.error(too_long)


@pytest.mark.feature("004-30")
def test_two_requests_of_a_session_in_one_poll_are_a_conflict() -> None:
    driver = Driver()
    driver.core.begin_poll()
    for request_id in (1, 2):
        driver.core.enqueue(request_id, Request([1], 2, session=SessionConfig(9, start=True)))
    driver.run()
    assert "session error 2 (conflict)" in driver.error(2)
    assert driver.tokens(1)[1:] == answer([1], 2)


@pytest.mark.feature("004-31")
@pytest.mark.parametrize("session_len, outputs", [(None, 20), (100, 20), (23, 20), (22, 19), (10, 7), (4, 1)])
def test_session_len_cuts_the_output_with_a_warning(
    session_len: int | None, outputs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """3 tokens and 20 more are 23."""
    driver = Driver()
    request = driver.turn(1, [1, 2, 3], 20, start=True, session_len=session_len)
    driver.run()
    assert driver.tokens(request) == answer([1, 2, 3], 20)[:outputs]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "session 1: 3 tokens of history and prompt and 20 of output exceed its session_len; the output is cut to "
        f"{outputs} tokens"
    ] * (outputs < 20)


@pytest.mark.feature("004-31")
def test_session_len_counts_history_and_what_is_refused_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    converse(driver, 1, [[1, 2]])
    length = len(driver.log(1))
    cut = driver.turn(1, [7], 20, session_len=length + 5)
    driver.run()
    assert len(driver.tokens(cut)) == 4 and f"session 1: {length + 1} tokens of history and prompt" in caplog.text
    caplog.clear()
    full = driver.turn(1, [7], 20, session_len=length + 5)
    driver.run()
    assert f"history and prompt have {length + 6} tokens, the limit is {length + 5}" in driver.error(full)
    assert not caplog.records


@pytest.mark.feature("004-16", "004-29")
def test_start_replaces_and_end_erases() -> None:
    driver = Driver()
    converse(driver, 1, [[1, 2]])
    replaced = driver.turn(1, [5], 3, start=True)
    driver.run()
    assert driver.tokens(replaced) == answer([5], 3)
    driver.turn(1, [6], 1, end=True)
    driver.run()
    assert driver.session(1) is None
    assert driver.core.kv.stats().used_num_blocks == 0


def test_stop_interrupts_a_turn_and_keeps_what_it_said() -> None:
    driver = Driver()
    request = driver.turn(1, [1, 2], 50, start=True)
    driver.step(5)
    driver.stop(1)
    said = driver.tokens(request)
    assert driver.reason(request) == "CANCELLED" and said == answer([1, 2], 5)
    again = driver.turn(1, [3], 3)
    driver.run()
    assert driver.tokens(again) == answer([1, 2, *said, 3], 3, counter=5)


def test_a_turn_cancelled_before_it_ran_leaves_the_session_as_it_was() -> None:
    driver = Driver(slots=1)
    (reply,) = converse(driver, 1, [[1, 2]])
    driver.ask([9], 20)
    driver.step()
    waiting = driver.turn(1, [7, 7, 7], 5)
    driver.core.cancel(waiting)
    driver.run()
    again = driver.turn(1, [3], 3)
    driver.run()
    assert driver.tokens(again) == answer([1, 2, *reply, 3], 3, counter=4)


def test_cancel_can_cut_the_session_behind_the_tokens_that_were_wanted() -> None:
    driver = Driver()
    request = driver.turn(1, [1, 2], 50, start=True)
    driver.step(6)
    driver.core.cancel(request, keep_output_tokens=2)
    assert driver.core.counters.requests_finished_total == {"STOP_WORDS": 1}, "a stop string is no cancellation"
    kept = answer([1, 2], 6)[:2]
    again = driver.turn(1, [3], 3)
    driver.run()
    assert driver.log(1) == [1, 2, *kept, 3, *driver.tokens(again)]


def test_sessions_are_bounded_in_number_and_age() -> None:
    driver = Driver(max_sessions=3)
    for session in range(1, 6):
        converse(driver, session, [[session]])
    assert [driver.session(s) is not None for s in range(1, 6)] == [False, False, True, True, True]
    driver.clock.advance(101)
    driver.core.expire()
    assert len(driver.core.sessions) == 0
    assert not driver.core.kv.state.tables
    driver.core.check_integrity()


@pytest.mark.feature("004-01")
def test_10000_requests_pass_through_one_persistent_batch() -> None:
    driver = Driver(slots=8)
    scheduler, workers = driver.core.scheduler, driver.core.workers
    workers._keep_trace = False
    done = 0
    for i in range(10_000):
        driver.core.enqueue(i + 1, Request([i % 1000], 1))
        if i % 8 == 7:
            done += sum(response.is_final for response in driver.core.step())
    while driver.core.has_work:
        done += sum(response.is_final for response in driver.core.step())
    assert done == 10_000
    assert driver.core.scheduler is scheduler and driver.core.workers is workers
    assert driver.used_blocks == 0


@pytest.mark.feature("003-40")
def test_without_chunks_new_tokens_must_fit_a_step_and_a_history_that_was_evicted_need_not() -> None:
    driver = Driver(max_num_tokens=8, chunked=False)
    turns = [[1] * 8, [2] * 6, [3] * 6]
    replies = converse(driver, 1, turns[:2])
    driver.core.kv.lose_everything()
    refused = driver.turn(1, [9] * 9, 4)
    assert driver.error(refused).startswith("session error 6 (too_long): the prompt has 9 tokens, the limit is 8")
    last = driver.turn(1, turns[2], 4)
    driver.run()
    assert [*replies, driver.tokens(last)] == expected_replies(turns)
    assert driver.core.counters.recomputed_tokens_total > 8


def test_a_turn_tells_the_tokens_before_it_once_and_only_if_asked() -> None:
    driver = Driver()
    asked = OutputConfig(return_history=True)
    first = driver.ask([1, 2, 3], 3, session=SessionConfig(1, start=True), output_config=asked)
    driver.run()
    log = driver.log(1)
    second = driver.ask([4, 5], 3, session=SessionConfig(1), output_config=asked)
    driver.run()
    rewound = driver.ask([6], 0, session=SessionConfig(1, step=4), output_config=asked)
    driver.run()
    told = lambda request: [response.result.history_token_ids for response in driver.responses[request]]
    assert told(first) == [[], None, None]
    assert told(second) == [log, None, None]
    assert told(rewound) == [log[:4]]
    unasked = driver.turn(1, [7], 2)
    driver.run()
    assert told(unasked) == [None, None]


def test_a_session_that_is_too_large_alone_stays_until_another_one_is_used() -> None:
    driver = Driver(max_session_bytes=1)
    for session in (1, 2, 1):
        driver.turn(session, [session, 2, 3], 2, start=True)
        driver.run()
        assert [key.id for key in driver.core.sessions._sessions] == [session]
    driver.stop(1, end=True)
    driver.step()
    assert len(driver.core.sessions) == driver.core.sessions.num_bytes == 0


def test_the_memory_of_sessions_is_counted_once_whatever_becomes_of_them() -> None:
    """It is that of the idle ones, and nothing is left of those that ran, were replaced, rewound, cancelled or erased."""
    driver = Driver()

    def check() -> None:
        idle = [seq for seq in driver.core.sessions.all() if seq.status is Status.IDLE]
        assert driver.core.sessions.num_bytes == sum(idle_bytes(seq.num_tokens, 4) for seq in idle)

    for fields in ({"start": True}, {}, {"step": 3}, {"start": True}, {}):
        request = driver.turn(1, [1, 2, 3, 4, 5], 6, **fields)
        driver.step(2)
        check()
        if not fields:
            driver.core.cancel(request)
        driver.run()
        check()
    driver.turn(2, [7], 3, start=True)
    driver.run()
    driver.turn(2, [8], 3, end=True)
    driver.step(2)
    check()
    driver.run()
    check()
    assert len(driver.core.sessions) == 1


def test_a_session_that_is_used_again_is_not_the_next_one_to_leave() -> None:
    driver = Driver(pool_tokens=128)  # at most 100 sessions
    driver.core.sessions._config = SessionsConfig(3, 1 << 28, idle_ttl_s=100.0)
    for session in (1, 2, 3):
        driver.turn(session, [session], 2, start=True)
        driver.run()
        driver.clock.advance(30.0)
    driver.turn(1, [5], 2)
    driver.run()
    assert [seq.session_key.id for seq in driver.core.sessions.all()] == [2, 3, 1]
    driver.turn(4, [4], 2, start=True)
    driver.run()
    assert [seq.session_key.id for seq in driver.core.sessions.newest()] == [4, 1, 3]
    driver.clock.advance(71.0)  # the last use of 3 was 101 s ago, that of 1 and 4 71 s
    driver.core.sessions.expire(driver.clock.monotonic_ns())
    assert [seq.session_key.id for seq in driver.core.sessions.all()] == [1, 4]
