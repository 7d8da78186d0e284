"""Drafts through the engine: they change when tokens come, never which. The worker is the model-free one, whose tokens depend on
every cell in reach, so that KV of a wrong draft that somebody read would change the output.
"""

from __future__ import annotations

import pytest

from backend.api import FinishReason, OutputConfig, Result, SamplingConfig, SessionConfig
from backend.api.config.schema import RecordsConfig, SpeculationConfig
from tests.engine.driver import VOCAB, Driver
from tests.fakes.hash_worker import oracle

PROMPT = [5, 6, 7, 8, 9]
METRICS = OutputConfig(return_perf_metrics=True, exclude_input_from_output=True)
LOOKUP = SpeculationConfig(mode="lookup")


def result(driver: Driver, request_id: int) -> Result:
    driver.run()
    last = driver.responses[request_id][-1]
    assert not last.has_error(), last
    return last.result


def drafts_of(driver: Driver) -> list[list[int]]:
    """The drafts of each step that had some."""
    return [row.drafts for step in driver.workers.trace for row in step.rows if row.drafts]


@pytest.mark.feature("000-20")
def test_of_four_drafts_two_are_right() -> None:
    """The prompt's step samples the first token, which is the first draft. The next step runs it with the other drafts: the
    second is right, and behind it comes what plain decoding has there. So 2 of 4 are accepted, with 3 tokens in 2 steps.
    """
    truth = oracle(PROMPT, 3, VOCAB)
    driver = Driver()
    drafts = [*truth[:2], (truth[2] + 1) % VOCAB, 10]
    request = driver.ask(PROMPT, 4, draft_tokens=drafts, output_config=METRICS, end_ids=(truth[2],), streaming=False)
    answer = result(driver, request)
    assert answer.output_token_ids == [truth] and len(truth) == 3
    assert len(driver.workers.trace) == 2
    metrics = answer.perf_metrics
    assert (metrics.num_accepted_draft_tokens, metrics.num_draft_tokens) == (2, 4)


def test_what_is_right_behind_a_wrong_draft_is_not_accepted() -> None:
    truth = oracle(PROMPT, 4, VOCAB)
    driver = Driver()
    drafts = [*truth[:2], (truth[2] + 1) % VOCAB, truth[3]]
    metrics = result(driver, driver.ask(PROMPT, 4, draft_tokens=drafts, output_config=METRICS)).perf_metrics
    assert (metrics.num_accepted_draft_tokens, metrics.num_draft_tokens) == (2, 4)


@pytest.mark.feature("000-20")
@pytest.mark.parametrize("num_right", range(7))
def test_the_output_is_that_of_plain_decoding(num_right: int) -> None:
    """Six drafts of which the first ones are right, in an output of nine tokens: the first token comes alone, then come the
    right drafts and one more together, then the rest one by one.
    """
    truth = oracle(PROMPT, 9, VOCAB)
    drafts = truth[:num_right] + [(token + 1) % VOCAB for token in truth[num_right:6]]
    driver = Driver()
    request = driver.ask(PROMPT, 9, draft_tokens=drafts)
    result(driver, request)
    deltas = [response.result.output_token_ids[0] for response in driver.responses[request]]
    assert sum(deltas, []) == truth
    together = max(1, num_right)  # with the first draft wrong nothing is tried
    assert [len(delta) for delta in deltas] == [1, together] + [1] * (8 - together)
    counters = driver.core.counters
    assert counters.generated_tokens_total == 9
    assert counters.draft_tokens_total == (5 if num_right else 0)
    assert counters.accepted_draft_tokens_total == max(0, num_right - 1)


@pytest.mark.parametrize("max_tokens", [6, 7, 8])
def test_drafts_stop_one_before_the_longest_end(max_tokens: int) -> None:
    """A row of n tokens yields up to n, so behind the first of m tokens it has use for m - 2 drafts."""
    truth = oracle(PROMPT, max_tokens, VOCAB)
    driver = Driver()
    request = driver.ask(PROMPT, max_tokens, draft_tokens=truth)
    answer = result(driver, request)
    assert drafts_of(driver) == [truth[1 : max_tokens - 1]]
    assert answer.finish_reasons == (FinishReason.LENGTH,)
    assert sum((r.result.output_token_ids[0] for r in driver.responses[request]), []) == truth


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_stop_word_within_the_run_cuts_it(at: int) -> None:
    """Plain decoding ends with the token that completes the stop word; so does a step that has sampled beyond it."""
    truth = oracle(PROMPT, 8, VOCAB)
    driver = Driver()
    request = driver.ask(PROMPT, 8, draft_tokens=truth, stop_words=[truth[at - 1 : at + 1]], output_config=METRICS)
    answer = result(driver, request)
    deltas = [response.result.output_token_ids[0] for response in driver.responses[request]]
    assert sum(deltas, []) == truth[: at + 1]
    assert answer.finish_reasons == (FinishReason.STOP_WORDS,)
    assert driver.core.counters.generated_tokens_total == at + 1


def test_log_probs_are_those_of_each_token() -> None:
    """The worker's log-probability of a token is the token's id."""
    truth = oracle(PROMPT, 6, VOCAB)
    driver = Driver()
    output = OutputConfig(return_log_probs=True, exclude_input_from_output=True)
    answer = result(driver, driver.ask(PROMPT, 6, draft_tokens=truth[:4], output_config=output, streaming=False))
    assert answer.log_probs == [[float(token) for token in truth]]
    assert answer.cum_log_probs == [float(sum(truth))]


def test_a_session_goes_on_behind_a_cut_run() -> None:
    """The worker knows more tokens of the slot than the session keeps; its next turn must not find them."""
    truth = oracle(PROMPT, 8, VOCAB)
    driver = Driver()
    session, stop = SessionConfig(1, start=True), [truth[2:4]]
    first = driver.ask(PROMPT, 8, draft_tokens=truth, stop_words=stop, session=session)
    driver.run()
    second = driver.turn(1, [1, 2], 4)
    driver.run()
    assert driver.tokens(first) == truth[:4]
    counter = 4  # tokens that the session has sampled before
    assert driver.tokens(second) == oracle([*PROMPT, *truth[:4], 1, 2], 4, VOCAB, counter=counter)


def test_drafts_leave_blocks_to_others() -> None:
    """Two sequences of 5 + 7 tokens need 3 blocks of 4 each and the pool has 6: drafts may not take what the other one needs."""
    truth = oracle(PROMPT, 8, VOCAB)
    other = [11, 12, 13, 14, 15]
    driver = Driver(pool_tokens=24, policy="max_utilization")
    requests = [driver.ask(prompt, 8, draft_tokens=truth) for prompt in (PROMPT, other)]
    driver.run()
    assert driver.core.counters.pauses_total == 0
    assert [driver.tokens(request) for request in requests] == [truth, oracle(other, 8, VOCAB)]


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_lookup_guesses_what_is_repeated(looks_ahead: bool) -> None:
    """A vocabulary of one token repeats itself: once three tokens match, all others are guessed, and are right."""
    driver = Driver(pool_tokens=256, speculation=LOOKUP, looks_ahead=looks_ahead, vocab=1)
    request = driver.ask([0] * 8, 60, output_config=METRICS)
    answer = result(driver, request)
    assert driver.tokens(request) == [0] * 60
    metrics = answer.perf_metrics
    assert metrics.num_draft_tokens == metrics.num_accepted_draft_tokens > 40
    assert len(driver.workers.trace) < 20


@pytest.mark.feature("000-60")
def test_how_many_tokens_a_step_brings_is_told_of_requests_and_steps() -> None:
    """Nine tokens: one of the prompt's step, then four drafts of which three are right and one more token, so four in one step,
    then the last four one by one. That is 9 tokens in 6 steps, and steps of 4, 1, 1, 1 and 1 tokens for the row that generates.
    """
    truth = oracle(PROMPT, 9, VOCAB)
    driver = Driver(records=RecordsConfig(max_iterations=100, max_request_iterations=100))
    driver.ask(PROMPT, 9, draft_tokens=[*truth[:4], (truth[4] + 1) % VOCAB])
    driver.run()
    records = driver.core.take_records()
    assert [step.num_gen_tokens for step in records.iterations] == [0, 4, 1, 1, 1, 1]
    assert [step.tokens_per_row for step in records.iterations] == [0.0, 4.0, 1.0, 1.0, 1.0, 1.0]
    told = [each.requests[0].tokens_per_step for each in records.requests]
    assert told == pytest.approx([1.0, 5 / 2, 6 / 3, 7 / 4, 8 / 5, 9 / 6])


def test_tokens_that_a_stop_word_cuts_off_were_not_decoded() -> None:
    """All drafts are right, and the third token completes the stop word: one token in the first step, two in the second."""
    truth = oracle(PROMPT, 8, VOCAB)
    driver = Driver(records=RecordsConfig(max_iterations=100, max_request_iterations=100))
    driver.ask(PROMPT, 8, draft_tokens=truth, stop_words=[truth[1:3]])
    driver.run()
    records = driver.core.take_records()
    assert [step.num_gen_tokens for step in records.iterations] == [0, 2]
    assert records.requests[-1].requests[0].tokens_per_step == 3 / 2


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_who_has_drafts_does_not_part_from_who_has_none(looks_ahead: bool) -> None:
    """Of two rows one repeats itself, and the other must not have guesses. No step is planned ahead for the other alone."""
    driver = Driver(pool_tokens=256, speculation=LOOKUP, looks_ahead=looks_ahead, vocab=1)
    quoting = driver.ask([0] * 8, 60)
    plain = driver.ask([0] * 8, 60, speculation=False)
    driver.step(2)
    while len(driver.tokens(quoting)) < 60:
        driver.step()
    assert driver.core.counters.accepted_draft_tokens_total > 40
    assert len(driver.workers.trace) < 20
    assert all(len(step.rows) == 2 for step in driver.workers.trace[1:])
    driver.run()
    assert driver.tokens(plain) == [0] * 60


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_draft_model_guesses_as_many_as_pay(looks_ahead: bool) -> None:
    """The fake's draft model is wrong at multiples of four. The output is as ever, in fewer steps than tokens."""
    speculation = SpeculationConfig(mode="draft_model", draft_model="small")
    driver = Driver(pool_tokens=256, speculation=speculation, looks_ahead=looks_ahead)
    request = driver.ask(PROMPT, 60)
    driver.run()
    assert driver.tokens(request) == oracle(PROMPT, 60, VOCAB)
    rows = [row for step in driver.workers.trace for row in step.rows]
    assert any(row.num_guesses > 1 for row in rows) and not any(row.drafts for row in rows)
    assert len(rows) < 40
    counters = driver.core.counters
    assert counters.generated_tokens_total == 60 == len(rows) + counters.accepted_draft_tokens_total


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_may_bound_the_guesses_of_a_step(most: int) -> None:
    """With a vocabulary of one token every guess is right."""
    driver = Driver(pool_tokens=256, speculation=LOOKUP, vocab=1)
    driver.ask([0] * 8, 30, max_draft_tokens=most)
    driver.run()
    assert max(map(len, drafts_of(driver)), default=0) == most


def test_guesses_are_bounded_only_where_there_are_some() -> None:
    for driver in (Driver(), Driver(speculation=LOOKUP, takes_drafts=False)):
        request = driver.ask(PROMPT, 8, max_draft_tokens=4)
        message = driver.responses[request][0].error_msg
        assert "max_draft_tokens is 4" in message and "start it with speculation.mode=lookup" in message
    driver = Driver(speculation=LOOKUP)
    request = driver.ask(PROMPT, 8, max_draft_tokens=-1)
    assert "max_draft_tokens is -1, the least is 0" in driver.responses[request][0].error_msg


def test_a_request_can_do_without() -> None:
    driver = Driver(pool_tokens=256, speculation=LOOKUP, vocab=1)
    driver.ask([0] * 8, 20, speculation=False)
    driver.run()
    assert not drafts_of(driver)


def test_nobody_guesses_unless_configured() -> None:
    driver = Driver(pool_tokens=256, vocab=1)
    driver.ask([0] * 8, 20)
    driver.run()
    assert not drafts_of(driver)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"draft_tokens": [VOCAB]}, "draft token 1000 is outside the vocabulary"),
        ({"draft_tokens": [1] * ((1 << 20) + 1)}, "draft_tokens has 1048577 tokens, the limit is 1048576"),
        (
            {"draft_tokens": [1], "sampling_config": SamplingConfig(top_k=4, top_p=0.9, top_p_decay=0.5)},
            "draft_tokens are given with top_p_decay",
        ),
        (
            {"draft_tokens": [1], "sampling_config": SamplingConfig(beam_width=2)},
            "draft_tokens are given with beam_width",
        ),
    ],
)
def test_what_cannot_be_verified_is_refused(fields: dict[str, object], sentence: str) -> None:
    driver = Driver()
    request = driver.ask(PROMPT, 8, **fields)
    assert sentence in driver.responses[request][0].error_msg


def test_workers_that_take_no_drafts() -> None:
    driver = Driver(takes_drafts=False, speculation=LOOKUP, vocab=1)
    request = driver.ask([0] * 8, 8, draft_tokens=[0])
    assert "draft_tokens are given" in driver.responses[request][0].error_msg
    request = driver.ask([0] * 8, 8)
    driver.run()
    assert driver.tokens(request) == [0] * 8 and not drafts_of(driver)


@pytest.mark.feature("000-20")
@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("num_right", range(5))
def test_a_request_that_ends_behind_its_drafts_has_the_right_ones_and_one_more(
    num_right: int, looks_ahead: bool
) -> None:
    """Also beside another request that leaves it no room, so that it is paused and its KV lost."""
    truth = oracle(PROMPT, 9, VOCAB)
    drafts = truth[:num_right] + [(token + 1) % VOCAB for token in truth[num_right:4]]
    driver = Driver(pool_tokens=32, looks_ahead=looks_ahead)
    other = driver.ask([7, 8, 9], 20)
    request = driver.ask(PROMPT, 9, draft_tokens=drafts, ends_after_drafts=True)
    driver.run()
    assert driver.tokens(request) == truth[: num_right + 1] and driver.reason(request) == "LENGTH"
    assert driver.tokens(other) == oracle([7, 8, 9], 20, VOCAB) and driver.used_blocks == 0
    end = driver.ask(PROMPT, 9, draft_tokens=truth, ends_after_drafts=True, end_ids=(truth[1],))
    driver.run()
    assert driver.tokens(end) == truth[:2] and driver.reason(end) == "END_ID", "whatever ends it first"
