"""Beam search in the engine: the same hypotheses as a plain search over whole sequences, whatever happens to rows and blocks."""

from __future__ import annotations

import pytest

from backend.api import OutputConfig, Result, SamplingConfig
from tests.engine.driver import VOCAB, Driver
from tests.fakes.beam_oracle import Beam, beam_search
from tests.fakes.hash_worker import cells_of, top_tokens

PROMPT = list(range(100, 110))  # two and a half blocks of 4 tokens
WORKERS = pytest.mark.parametrize("worker", [{}, {"looks_ahead": True}], ids=["one step", "ahead"])


def oracle(prompt: list[int], max_tokens: int, width: int, vocab: int = VOCAB, **options: object) -> list[Beam]:
    def top(ids: list[int], count: int) -> list[tuple[int, float]]:
        return top_tokens(cells_of(ids), len(ids) - len(prompt), count, vocab)

    return beam_search(list(prompt), max_tokens, width, top, **options)


def ask(driver: Driver, width: int, max_tokens: int = 8, prompt: list[int] = PROMPT, **fields: object) -> int:
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingConfig.__struct_fields__}
    fields = {"streaming": False, "output_config": OutputConfig(exclude_input_from_output=True), **fields}
    return driver.ask(prompt, max_tokens, sampling_config=SamplingConfig(beam_width=width, **sampling), **fields)


def final(driver: Driver, request_id: int) -> Result:
    *_, last = driver.responses[request_id]
    assert last.is_final and [response.is_final for response in driver.responses[request_id]].count(True) == 1
    return last.result


def check(driver: Driver, request_id: int, beams: list[Beam]) -> None:
    result = final(driver, request_id)
    assert result.output_token_ids == [beam.tokens for beam in beams]
    assert result.cum_log_probs == pytest.approx([beam.total for beam in beams])
    assert [reason.name for reason in result.finish_reasons] == [beam.reason for beam in beams]


@pytest.mark.feature("000-25", "000-32", "003-07", "003-53")
@WORKERS
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("width", [2, 4])
def test_the_beams_are_those_of_a_plain_search(width: int, reuse: bool, worker: dict[str, bool]) -> None:
    driver = Driver(pool_tokens=256, reuse=reuse, **worker)
    request_id = ask(driver, width, 20)
    driver.run()
    check(driver, request_id, oracle(PROMPT, 20, width))


@pytest.mark.feature("000-32")
@pytest.mark.parametrize("early_stopping", [None, 1, 0, 2])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
def test_hypotheses_end_and_are_ranked_with_length_penalty_and_early_stopping(
    length_penalty: float, early_stopping: int | None
) -> None:
    for prompt in ([5, 6, 7], [8], PROMPT):
        plain = oracle(prompt, 12, 4)
        options = {"end_ids": (plain[0].tokens[3], plain[1].tokens[5]), "min_tokens": 2}
        driver = Driver(pool_tokens=256)
        request_id = ask(driver, 4, 12, prompt, length_penalty=length_penalty, early_stopping=early_stopping, **options)
        driver.run()
        rule = 1 if early_stopping is None else early_stopping
        check(
            driver,
            request_id,
            oracle(prompt, 12, 4, length_penalty=length_penalty, early_stopping=rule, **options),
        )


@pytest.mark.parametrize("early_stopping", [None, 1, 0, 2])
def test_when_a_search_ends_follows_early_stopping(early_stopping: int | None) -> None:
    """Six of sixteen tokens end a hypothesis, so that a full set of them has ended long before the longest could."""
    prompt, options = [0, 1, 0], {"end_ids": (3, 7, 9, 11, 15, 1), "length_penalty": 2.0}
    rules = {rule: oracle(prompt, 12, 3, 16, early_stopping=rule, **options) for rule in (1, 0, 2)}
    assert rules[1] != rules[0] != rules[2] != rules[1]
    driver = Driver(pool_tokens=256, vocab=16)
    request_id = ask(driver, 3, 12, prompt, early_stopping=early_stopping, **options)
    driver.run()
    check(driver, request_id, rules[1 if early_stopping is None else early_stopping])


def test_stop_words_and_bad_words_hold_for_beams() -> None:
    plain = oracle(PROMPT, 10, 3)
    stop_words, bad_words = [plain[0].tokens[2:4]], [[plain[1].tokens[0]], plain[2].tokens[3:5]]
    driver = Driver(pool_tokens=256)
    request_id = ask(driver, 3, 10, stop_words=stop_words, bad_words=bad_words)
    driver.run()
    check(driver, request_id, oracle(PROMPT, 10, 3, stop_words=tuple(stop_words), bad_words=tuple(bad_words)))


def test_beams_find_enough_tokens_though_the_most_likely_ones_are_all_bad_words() -> None:
    """Each row tells so many candidates that enough are left when every bad word is among them."""
    bad_words = [[token] for token, _ in top_tokens(cells_of(PROMPT), 0, 12, VOCAB)]
    driver = Driver(pool_tokens=256)
    request_id = ask(driver, 2, 4, bad_words=bad_words)
    driver.run()
    check(driver, request_id, oracle(PROMPT, 4, 2, bad_words=tuple(bad_words)))


def test_a_diversity_rate_below_zero_spreads_the_beams_over_more_origins() -> None:
    driver = Driver(pool_tokens=256)
    request_id = ask(driver, 4, 6, beam_search_diversity_rate=-0.5)
    driver.run()
    assert oracle(PROMPT, 6, 4, diversity=-0.5) != oracle(PROMPT, 6, 4)
    check(driver, request_id, oracle(PROMPT, 6, 4, diversity=-0.5))


@pytest.mark.feature("000-30")
def test_as_many_beams_are_returned_as_sequences_are_asked_for_all_of_index_0() -> None:
    driver = Driver(pool_tokens=256)
    request_id = ask(driver, 4, 6, num_return_sequences=2)
    driver.run()
    assert len(driver.responses[request_id]) == 1 and final(driver, request_id).sequence_index == 0
    check(driver, request_id, oracle(PROMPT, 6, 4)[:2])


def test_beams_of_each_length_from_the_prompt_on() -> None:
    for max_tokens in (0, 1, 2):
        driver = Driver(pool_tokens=256)
        request_id = ask(driver, 3, max_tokens)
        driver.run()
        result = final(driver, request_id)
        assert result.output_token_ids == ([beam.tokens for beam in oracle(PROMPT, max_tokens, 3)] or [[]])


def test_a_stream_tells_all_of_all_beams_each_time() -> None:
    driver = Driver(pool_tokens=256)
    request_id = ask(driver, 3, 5, streaming=True, output_config=OutputConfig(return_log_probs=True))
    driver.run()
    results = [response.result for response in driver.responses[request_id]]
    assert [[len(beam) for beam in result.output_token_ids] for result in results] == [[n] * 3 for n in range(1, 6)]
    for result in results:
        assert list(map(sum, result.log_probs)) == pytest.approx(result.cum_log_probs)
    check(driver, request_id, oracle(PROMPT, 5, 3))


@WORKERS
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.feature("003-50")
def test_pauses_and_evictions_of_beams_are_not_seen(policy: str, worker: dict[str, bool]) -> None:
    driver = Driver(pool_tokens=100, policy=policy, slots=9, **worker)
    prompts = [PROMPT, [1, 2, 3], [4, 5, 6, 7, 8], PROMPT[:5]]
    ids = [ask(driver, 3, 18, prompt) for prompt in prompts]
    driver.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        check(driver, request_id, oracle(prompt, 18, 3))
    assert bool(driver.core.counters.pauses_total) == (policy == "max_utilization")


@pytest.mark.feature("003-10", "003-01")
def test_beams_take_as_many_rows_of_the_batch_as_there_are_and_all_of_them_or_none() -> None:
    driver = Driver(pool_tokens=1024, slots=7)
    for prompt in (PROMPT, [1, 2], [3, 4]):
        ask(driver, 3, 30, prompt)
    driver.step()
    assert len(driver.core.scheduler.running) == 6 and len(driver.core.scheduler.waiting) == 3


@pytest.mark.feature("000-34", "000-35")
@WORKERS
def test_widths_are_not_mixed_and_change_in_the_order_of_the_requests(worker: dict[str, bool]) -> None:
    """Queue 1, 1, 4, 1: the third waits until the first two have ended, the fourth until the third has."""
    driver = Driver(pool_tokens=1024, slots=8, **worker)
    ids = [ask(driver, width, 6, [width, index]) for index, width in enumerate((1, 1, 4, 1))]
    seen: list[list[int]] = []
    while driver.core.has_work:
        driver.step()
        running = driver.core.scheduler.running
        assert len({seq.beam_width for seq in running}) <= 1
        alive = sorted({seq.request_id for seq in running})
        seen += [alive] if alive and alive != seen[-1:] else []
    assert [alive for i, alive in enumerate(seen) if not i or seen[i - 1] != alive] == [ids[:2], [ids[2]], [ids[3]]]
    check(driver, ids[2], oracle([4, 2], 6, 4))


@pytest.mark.feature("000-35")
def test_the_width_changes_as_often_as_the_requests_ask() -> None:
    driver = Driver(pool_tokens=1024, slots=8)
    ids = [ask(driver, width, 5, [width, 9]) for width in (1, 4, 1, 2)]
    driver.run()
    check(driver, ids[1], oracle([4, 9], 5, 4))
    check(driver, ids[3], oracle([2, 9], 5, 2))


@pytest.mark.feature("000-33")
def test_a_request_for_wider_beams_than_are_allowed_is_refused_by_name() -> None:
    driver = Driver(slots=4)
    refused = ask(driver, 5)
    assert "beam_width is 5, allowed is 1 to 4 (scheduler.max_beam_width" in driver.error(refused)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_return_sequences": 3}, "num_return_sequences is 3, more than beam_width 2"),
        ({"temperature": 0.7}, "temperature is 0.7, and beams are not sampled"),
        ({"top_k": 5}, "top_k is 5, and beams are not sampled"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
        ({"logit_bias": {1: 2.0}}, "logit_bias cannot be had with beams"),
        ({"output_config": OutputConfig(top_log_probs=2)}, "top_log_probs cannot be had with beams"),
        (
            {"end_ids": tuple(range(60)), "stop_words": [[1]] * 5},
            "65 end ids and stop words, the limit with beams is 64",
        ),
        ({"beam_width_array": [2, 3]}, "beam_width_array cannot be had"),
        ({"length_penalty": float("nan")}, "length_penalty is nan, allowed is -50 to 50"),
        ({"beam_search_diversity_rate": 101.0}, "beam_search_diversity_rate is 101.0"),
    ],
)
def test_what_cannot_be_had_with_beams_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    driver = Driver()
    assert message in driver.error(ask(driver, 2, **fields))


def test_beams_that_the_pool_cannot_hold_are_refused() -> None:
    driver = Driver(pool_tokens=64)
    assert "10 prompt tokens and 30 output tokens of 4 beams need 34 KV blocks" in driver.error(ask(driver, 4, 30))
    driver = Driver(pool_tokens=64, policy="max_utilization")
    assert "of 4 beams need 40 KV blocks" in driver.error(ask(driver, 4, 30))


def test_cancelled_beams_are_told_as_far_as_they_have_come() -> None:
    driver = Driver(pool_tokens=256)
    request_id = ask(driver, 3, 50)
    driver.step(4)
    driver.core.cancel(request_id)
    driver._collect(driver.core.take_responses())
    result = final(driver, request_id)
    assert [len(beam) for beam in result.output_token_ids] == [4, 4, 4]
    assert {reason.name for reason in result.finish_reasons} == {"CANCELLED"}
    assert driver.used_blocks == 0 and not driver.core.has_work
    assert driver.core.counters.requests_finished_total == {"CANCELLED": 1}


def test_beams_that_are_cancelled_before_they_begin_have_one_empty_output() -> None:
    driver = Driver(pool_tokens=256)
    request_id = ask(driver, 3, 50)
    driver.core.cancel(request_id)
    driver._collect(driver.core.take_responses())
    assert final(driver, request_id).output_token_ids == [[]]


def test_a_failed_step_ends_beams_with_one_error() -> None:
    driver = Driver(pool_tokens=256)
    request_id = ask(driver, 3, 50)
    driver.step(3)
    driver.workers.fail_next = RuntimeError("planted")
    driver.run()
    assert driver.error(request_id).startswith("the model step failed")
    assert driver.used_blocks == 0


def test_beams_share_the_blocks_that_they_have_in_common() -> None:
    driver = Driver(pool_tokens=1024, slots=8)
    ask(driver, 8, 50, list(range(400)))
    driver.step(6)
    assert driver.used_blocks <= 100 + 8 * 3
