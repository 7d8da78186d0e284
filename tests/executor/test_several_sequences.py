"""Requests that return several sequences, or beams, through an Executor: in this process and over the engine's socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.api import OutputConfig, Request, Response, SamplingConfig
from backend.engine.groups import stream_seed
from backend.executor import Executor
from backend.wire.client import wait_until
from tests.executor.helpers import assert_processed, drain, engine, make_executor
from tests.fakes.beam_oracle import beam_search
from tests.fakes.hash_worker import cells_of, oracle, top_tokens

PROMPT, VOCAB = [1, 2, 3, 4, 5, 6], 1000


@pytest.fixture(params=["in process", "socket"])
def executor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Executor]:
    if request.param == "in process":
        with make_executor() as executor:
            yield executor
    else:
        with engine(tmp_path / "s"), Executor.attach(str(tmp_path / "s"), 5) as executor:
            yield executor


def ask(executor: Executor, **sampling: object) -> list[Response]:
    request = Request(PROMPT, 5, sampling_config=SamplingConfig(**sampling), streaming=True)
    request_id = executor.enqueue_request(request)
    responses = drain(executor, [request_id])[request_id]
    assert_processed(executor, request_id)
    return responses


@pytest.mark.feature("000-28", "000-29", "000-31")
def test_a_request_ends_with_its_last_sequence(executor: Executor) -> None:
    responses = ask(executor, num_return_sequences=3, temperature=1.0, seed=5)
    outputs: dict[int, list[int]] = {}
    for response in responses:
        outputs.setdefault(response.result.sequence_index, []).extend(response.result.output_token_ids[0])
    assert outputs == {i: oracle(PROMPT, 5, VOCAB, seed=stream_seed(5, i)) for i in range(3)}
    assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
    ends = [response for response in responses if response.result.is_sequence_final]
    assert sorted(response.result.sequence_index for response in ends) == [0, 1, 2]
    assert all(response.account is not None for response in ends)


@pytest.mark.feature("000-25", "000-30", "000-32")
def test_beams_come_ranked_in_one_result(executor: Executor) -> None:
    *_, last = ask(executor, beam_width=4, num_return_sequences=2)

    def top(ids: list[int], count: int) -> list[tuple[int, float]]:
        return top_tokens(cells_of(ids), len(ids) - len(PROMPT), count, VOCAB)

    beams = beam_search(PROMPT, 5, 4, top)[:2]
    assert last.result.output_token_ids == [beam.tokens for beam in beams]
    assert last.result.cum_log_probs == pytest.approx([beam.total for beam in beams])
    assert last.result.sequence_index == 0 and last.is_final


def test_one_sequence_of_a_request_can_be_cancelled(executor: Executor) -> None:
    config = SamplingConfig(num_return_sequences=2, temperature=1.0, seed=5)
    request_id = executor.enqueue_request(Request(PROMPT, 60, sampling_config=config, streaming=True))
    first = executor.await_responses(request_id, 5.0)
    executor.cancel_request(request_id, sequence_index=1)
    responses = first + drain(executor, [request_id])[request_id]
    reasons = {
        r.result.sequence_index: r.result.finish_reasons[0].name for r in responses if r.result.is_sequence_final
    }
    assert reasons[0] == "LENGTH" and reasons[1] in ("CANCELLED", "LENGTH"), "it may have been too late"


def test_the_books_balance_when_a_client_leaves_in_the_middle(tmp_path: Path) -> None:
    with engine(tmp_path / "s") as core:
        client = Executor.attach(str(tmp_path / "s"), 5)
        for sampling in (SamplingConfig(num_return_sequences=3), SamplingConfig(beam_width=3)):
            output = OutputConfig(return_log_probs=True)
            client.enqueue_request(Request(PROMPT, 50, sampling_config=sampling, output_config=output))
        client.shutdown()
        assert wait_until(lambda: core.num_live == 0 and core.kv.stats().used_num_blocks == 0, 5)
        counters = core.counters
        assert sum(counters.requests_finished_total.values()) == counters.requests_accepted_total
