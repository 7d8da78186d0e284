"""Requests that return several sequences: one prompt, n outputs, each as if it had been asked for alone."""

from __future__ import annotations

import pytest

from backend.api import OutputConfig, SamplingConfig
from backend.core.step import StepInput
from backend.engine.groups import stream_seed
from tests.engine.driver import VOCAB, Driver, answer

PROMPT = list(range(100, 110))  # two and a half blocks of 4 tokens


def several(count: int, seed: int | None = 7, **fields: object) -> SamplingConfig:
    return SamplingConfig(num_return_sequences=count, temperature=1.0, seed=seed, **fields)


def outputs(driver: Driver, request_id: int) -> list[list[int]]:
    """The tokens of each sequence, put together from its responses."""
    by_index: dict[int, list[int]] = {}
    for response in driver.responses[request_id]:
        by_index.setdefault(response.result.sequence_index, []).extend(response.result.output_token_ids[0])
    return [by_index[index] for index in sorted(by_index)]


def expected(count: int, num_tokens: int, seed: int = 7, prompt: list[int] = PROMPT) -> list[list[int]]:
    return [answer(prompt, num_tokens, seed=stream_seed(seed, index)) for index in range(count)]


def num_prompt_tokens_run(trace: list[StepInput], num_prompt: int = len(PROMPT)) -> int:
    return sum(max(0, min(row.num_tokens, num_prompt - row.num_computed)) for step in trace for row in step.rows)


@pytest.mark.feature("000-28", "000-29")
@pytest.mark.parametrize("streaming", [True, False])
def test_each_sequence_has_its_own_random_stream_and_the_first_is_that_of_a_request_for_one(streaming: bool) -> None:
    driver = Driver(pool_tokens=128)
    fields = {"streaming": streaming, "output_config": OutputConfig(exclude_input_from_output=True)}
    request_id = driver.ask(PROMPT, 6, sampling_config=several(3), **fields)
    alone = driver.ask(PROMPT, 6, sampling_config=SamplingConfig(temperature=1.0, seed=7), **fields)
    driver.run()
    assert outputs(driver, request_id) == expected(3, 6)
    assert outputs(driver, alone) == [outputs(driver, request_id)[0]]
    assert len({tuple(tokens) for tokens in outputs(driver, request_id)}) == 3


@pytest.mark.feature("000-28")
def test_without_streaming_there_is_one_response_for_each_sequence() -> None:
    driver = Driver(pool_tokens=128)
    request_id = driver.ask(PROMPT, 3, sampling_config=several(4), streaming=False)
    driver.run()
    results = [response.result for response in driver.responses[request_id]]
    assert sorted(result.sequence_index for result in results) == [0, 1, 2, 3]
    assert all(result.output_token_ids[0][: len(PROMPT)] == PROMPT for result in results)
    assert [result.is_final for result in results] == [False, False, False, True]


@pytest.mark.feature("000-31")
def test_a_sequence_may_end_before_the_others_and_only_the_last_response_is_final() -> None:
    driver = Driver(pool_tokens=128)
    long = expected(3, 8)
    request_id = driver.ask(PROMPT, 8, sampling_config=several(3), stop_words=[long[1][2:4]])
    driver.run()
    results = [response.result for response in driver.responses[request_id]]
    assert outputs(driver, request_id) == [long[0], long[1][:4], long[2]]
    ends = [(result.sequence_index, result.finish_reasons[0].name) for result in results if result.is_sequence_final]
    assert ends[0] == (1, "STOP_WORDS") and {reason for _, reason in ends[1:]} == {"LENGTH"} and len(ends) == 3
    assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]


@pytest.mark.parametrize("worker", [{}, {"looks_ahead": True}])
@pytest.mark.parametrize("reuse", [True, False])
def test_the_prompt_is_computed_once(reuse: bool, worker: dict[str, bool]) -> None:
    driver = Driver(pool_tokens=256, reuse=reuse, **worker)
    request_id = driver.ask(PROMPT, 5, sampling_config=several(4))
    driver.run()
    assert outputs(driver, request_id) == expected(4, 5)
    followers = 3  # each runs the last token of the prompt again: it yields the logits of its first token
    assert num_prompt_tokens_run(driver.workers.trace) == len(PROMPT) + followers


def test_the_prompt_is_computed_once_even_if_the_first_sequence_ends_with_its_first_token() -> None:
    driver = Driver(pool_tokens=256, reuse=False)
    request_id = driver.ask(PROMPT, 1, sampling_config=several(4))
    driver.run()
    assert outputs(driver, request_id) == expected(4, 1)
    assert num_prompt_tokens_run(driver.workers.trace) == len(PROMPT) + 3


def test_the_shared_blocks_are_there_once() -> None:
    driver = Driver(pool_tokens=256, reuse=False)
    driver.ask(PROMPT, 3, sampling_config=several(4))
    driver.step(2)
    assert driver.used_blocks == 2 + 4, "two whole blocks of the prompt for all, and a third one for each"


def test_the_prompt_is_computed_in_chunks_by_the_first_alone() -> None:
    driver = Driver(pool_tokens=256, max_num_tokens=4)
    request_id = driver.ask(PROMPT, 4, sampling_config=several(3))
    driver.run()
    assert outputs(driver, request_id) == expected(3, 4)
    assert [len(step.rows) for step in driver.workers.trace[:3]] == [1, 1, 1]


def test_more_sequences_than_slots_take_turns() -> None:
    driver = Driver(pool_tokens=64, slots=2)
    request_id = driver.ask(PROMPT, 4, sampling_config=several(7))
    driver.run()
    assert outputs(driver, request_id) == expected(7, 4)


@pytest.mark.parametrize("worker", [{}, {"looks_ahead": True}])
def test_pauses_and_evictions_are_not_seen(worker: dict[str, bool]) -> None:
    driver = Driver(pool_tokens=40, policy="max_utilization", **worker)
    first = driver.ask(PROMPT, 16, sampling_config=several(4))
    second = driver.ask(PROMPT[:3], 20, sampling_config=several(2, seed=9))
    driver.run()
    assert driver.core.counters.pauses_total and driver.core.counters.recomputed_tokens_total
    assert outputs(driver, first) == expected(4, 16)
    assert outputs(driver, second) == expected(2, 20, 9, PROMPT[:3])


def test_a_cancelled_request_ends_in_all_its_sequences_wherever_they_are() -> None:
    driver = Driver(pool_tokens=128, slots=2)
    request_id = driver.ask(PROMPT, 9, sampling_config=several(4))
    driver.step(3)
    driver.core.cancel(request_id)
    driver._collect(driver.core.take_responses())
    results = [response.result for response in driver.responses[request_id]]
    ends = [result for result in results if result.is_sequence_final]
    assert sorted(result.sequence_index for result in ends) == [0, 1, 2, 3]
    assert {result.finish_reasons[0].name for result in ends} == {"CANCELLED"}
    assert [result.is_final for result in results].count(True) == 1 and results[-1].is_final
    assert driver.used_blocks == 0 and not driver.core.has_work
    assert driver.core.counters.requests_finished_total == {"CANCELLED": 1}


def test_one_sequence_can_be_ended_while_the_others_go_on() -> None:
    """As a stop string does that only one of the texts has met."""
    driver = Driver(pool_tokens=128)
    request_id = driver.ask(PROMPT, 6, sampling_config=several(3))
    driver.step(3)
    driver.core.cancel(request_id, keep_output_tokens=1, sequence_index=0)
    driver.run()
    found, long = outputs(driver, request_id), expected(3, 6)
    assert found[1:] == long[1:] and found[0] == long[0][: len(found[0])] and len(found[0]) < 6
    assert driver.responses[request_id][-1].is_final
    assert driver.core.counters.requests_finished_total == {"LENGTH": 1}


def test_the_first_sequence_can_be_ended_before_the_prompt_is_computed() -> None:
    driver = Driver(pool_tokens=128, max_num_tokens=4)
    request_id = driver.ask(PROMPT, 3, sampling_config=several(3))
    driver.step()
    driver.core.cancel(request_id, sequence_index=0)
    driver.run()
    assert outputs(driver, request_id)[1:] == expected(3, 3)[1:]


def test_a_deadline_ends_all_sequences() -> None:
    driver = Driver(pool_tokens=128, slots=2)
    request_id = driver.ask(PROMPT, 50, sampling_config=several(3), timeout_s=1.0)
    driver.step(2)
    driver.clock.advance(2.0)
    driver.step()
    ends = [r.result for r in driver.responses[request_id] if r.result.is_sequence_final]
    assert [result.finish_reasons[0].name for result in ends] == ["TIMED_OUT"] * 3
    assert [result.is_final for result in ends] == [False, False, True]


def test_a_failed_step_ends_the_request_with_one_error() -> None:
    driver = Driver(pool_tokens=128, slots=2)
    request_id = driver.ask(PROMPT, 9, sampling_config=several(4))
    other = driver.ask(PROMPT, 3, sampling_config=several(2))
    driver.step(3)
    driver.workers.fail_next = RuntimeError("planted")
    driver.run()
    errors = [response for response in driver.responses[request_id] if response.has_error()]
    assert len(errors) == 1 and driver.responses[request_id][-1].is_final
    assert outputs(driver, other) == expected(2, 3)
    assert driver.core.counters.requests_finished_total == {"ERROR": 1, "LENGTH": 1}


def test_the_prompt_may_be_all_that_is_asked_for() -> None:
    driver = Driver(pool_tokens=128)
    request_id = driver.ask(PROMPT, 0, sampling_config=several(3))
    driver.run()
    results = [response.result for response in driver.responses[request_id]]
    assert [result.output_token_ids for result in results] == [[[]]] * 3 and results[-1].is_final


def test_all_sequences_count_against_the_limits_of_the_queue() -> None:
    driver = Driver(pool_tokens=128)
    refused = driver.ask(PROMPT, 3, sampling_config=several(3000))
    assert "num_return_sequences is 3000, allowed is 1 to 2048 (limits.max_queue_size)" in driver.error(refused)
    driver.ask(PROMPT, 3, sampling_config=several(2000))
    refused = driver.ask(PROMPT, 3, sampling_config=several(49))
    assert "Maximum queue size of 2048" in driver.error(refused)
    driver.ask(PROMPT, 3, sampling_config=several(48))
    assert driver.core.stats().counters.requests_accepted_total == 2


def test_the_prompt_of_each_sequence_counts_against_the_limit_of_queued_tokens() -> None:
    driver = Driver(pool_tokens=1 << 20)
    refused = driver.ask([1] * 5000, 3, sampling_config=several(1000))
    assert "limits.max_queued_tokens" in driver.error(refused)


def test_a_session_returns_one_sequence() -> None:
    driver = Driver()
    refused = driver.ask(PROMPT, 3, sampling_config=several(2), session=driver_session(1))
    assert "num_return_sequences is 2, a session's turn has 1" in driver.error(refused)


def driver_session(number: int) -> object:
    from backend.api import SessionConfig

    return SessionConfig(number, start=True)


def test_streams_of_different_sequences_and_seeds_are_different() -> None:
    seeds = {stream_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 50 * 50 and all(0 <= seed < 1 << 64 for seed in seeds)
    assert stream_seed((1 << 64) - 1, 3) == stream_seed((1 << 64) - 1, 3) and VOCAB


def test_others_run_while_sequences_wait_for_their_prompt() -> None:
    driver = Driver(pool_tokens=256, slots=8, max_num_tokens=8)
    first = driver.ask(PROMPT, 3, sampling_config=several(3))
    second = driver.ask([1, 2], 3)
    driver.step()
    assert [seq.request_id for seq in driver.core.scheduler.running] == [first]  # whose prompt takes the whole step
    driver.step(2)
    assert sorted(seq.request_id for seq in driver.core.scheduler.running) == [first] * 3 + [second]
    driver.run()
    assert driver.tokens(second) == answer([1, 2], 3)


def test_a_request_for_many_sequences_leaves_slots_to_a_request_that_comes_later() -> None:
    driver = Driver(pool_tokens=1024, slots=16, max_num_tokens=64)
    many = driver.ask([1, 2], 50, sampling_config=several(40))
    driver.step(4)
    assert [seq.request_id for seq in driver.core.scheduler.running] == [many] * 14
    later = [driver.ask([3], 2), driver.ask([4], 2, sampling_config=several(2))]
    driver.step()
    assert [seq.request_id for seq in driver.core.scheduler.running][14:] == later
    driver.run()
    assert driver.tokens(later[0]) == answer([3], 2)
