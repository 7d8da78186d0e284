"""Requests go on when their engine process is killed: the same bytes as without it, and never an error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from backend.api import ErrorCode, OutputConfig, Request, Response, SamplingConfig, SessionConfig
from backend.api.config.schema import TritonConfig
from backend.executor import Executor
from backend.wire.client import wait_until
from tests.executor.hash_engine import KILLS
from tests.executor.helpers import POOL
from tests.fakes.hash_worker import oracle


class Heard:
    """The responses of one request."""

    def __init__(self, executor: Executor, request: Request) -> None:
        self.responses: list[Response] = []
        self.done = threading.Event()
        self.request_id = executor.submit(request, self._hear)

    def _hear(self, response: Response) -> None:
        assert not self.done.is_set(), "something came behind the final response"
        self.responses.append(response)
        if response.is_final:
            self.done.set()

    def wait(self, num_responses: int) -> None:
        assert wait_until(lambda: len(self.responses) >= num_responses or self.done.is_set(), 20)

    def tokens(self, sequence_index: int = 0) -> list[int]:
        assert self.done.wait(30), f"no end; so far {self.responses}"
        assert not self.responses[-1].has_error(), self.responses[-1].error_msg
        parts = [each.result for each in self.responses if each.result.sequence_index == sequence_index]
        return [token for part in parts for token in part.output_token_ids[0]]


def kill(owner: Executor) -> None:
    """Kill the engine process, and wait until the owner knows."""
    before = owner._process.num_deaths
    os.kill(owner._process.pid, signal.SIGKILL)
    assert wait_until(lambda: owner._process.num_deaths > before and not owner.is_ready(), 10)


def stream(prompt: list[int], max_tokens: int = 100, **fields: object) -> Request:
    return Request(prompt, max_tokens, streaming=True, **fields)


@pytest.mark.parametrize("num_before", [0, 1, 20])
def test_a_stream_goes_on_with_the_tokens_that_it_would_have_had(owner: Executor, num_before: int) -> None:
    heard = [Heard(owner, stream([i, 7])) for i in range(1, 7)]  # more than there are slots: some have had nothing
    heard[0].wait(num_before)
    kill(owner)
    for i, each in enumerate(heard, start=1):
        assert each.tokens() == oracle([i, 7], 100, 1000)
        assert {response.request_id for response in each.responses} == {each.request_id}
    assert (owner.pauses.resumed_requests, owner.pauses.pauses) == (6, 1) and owner.pauses.paused_s > 0


def test_log_probs_and_their_sums_are_those_of_an_undisturbed_stream(owner: Executor) -> None:
    """The worker's log-probability of a token is its id."""
    heard = Heard(owner, stream([1, 2], output_config=OutputConfig(return_log_probs=True)))
    heard.wait(10)
    kill(owner)
    tokens, total = heard.tokens(), 0.0
    assert tokens == oracle([1, 2], 100, 1000)
    for response in heard.responses:
        result = response.result
        assert result.log_probs == [[float(token) for token in result.output_token_ids[0]]]
        total += sum(result.output_token_ids[0])
        assert result.cum_log_probs == [total]


def test_without_streaming_the_one_answer_is_whole(owner: Executor) -> None:
    heard = Heard(owner, Request([1, 2], 100, output_config=OutputConfig(exclude_input_from_output=True)))
    time.sleep(0.05)
    kill(owner)
    assert heard.tokens() == oracle([1, 2], 100, 1000) and len(heard.responses) == 1


def test_all_tokens_so_far_in_each_response_stay_all_of_them(owner: Executor) -> None:
    for output in (OutputConfig(), OutputConfig(return_log_probs=True)):
        heard = Heard(owner, stream([3, 2], return_all_generated_tokens=True, output_config=output))
        heard.wait(10)
        kill(owner)
        heard.tokens()
        right = oracle([3, 2], 100, 1000)
        assert [each.result.output_token_ids[0] for each in heard.responses] == [right[: i + 1] for i in range(100)]
        assert wait_until(owner.is_ready, 10)


@pytest.mark.parametrize("streaming", [True, False])
def test_each_of_several_sequences_goes_on_and_ended_ones_are_not_told_again(owner: Executor, streaming: bool) -> None:
    def request(max_tokens: int) -> Request:
        asked = SamplingConfig(num_return_sequences=3, seed=5)
        return Request([1, 2, 3, 4, 5], max_tokens, streaming, asked, OutputConfig(exclude_input_from_output=True))

    undisturbed = Heard(owner, request(80))
    right = [undisturbed.tokens(index) for index in range(3)]
    heard = Heard(owner, request(80))
    heard.wait(8 if streaming else 0)
    owner.cancel_request(heard.request_id, sequence_index=1)
    assert wait_until(lambda: any(each.result.is_sequence_final for each in heard.responses), 10)
    kill(owner)
    for index in (0, 2):
        assert heard.tokens(index) == right[index]
    part = heard.tokens(1)
    assert part == right[1][: len(part)] and len(part) < 80
    ends = [each.result.sequence_index for each in heard.responses if each.result.is_sequence_final]
    assert sorted(ends) == [0, 1, 2] and sum(each.is_final for each in heard.responses) == 1


def test_beams_give_the_responses_that_they_would_have_given(owner: Executor) -> None:
    request = stream([1, 2], 40, sampling_config=SamplingConfig(beam_width=3))
    undisturbed = Heard(owner, request)
    assert undisturbed.done.wait(20)
    heard = Heard(owner, request)
    heard.wait(10)
    kill(owner)
    assert heard.done.wait(20)
    told = [
        [(each.result.output_token_ids, each.result.cum_log_probs) for each in one.responses]
        for one in (heard, undisturbed)
    ]
    assert told[0] == told[1]


def test_a_request_that_was_cancelled_while_no_engine_was_there_ends_as_cancelled(owner: Executor) -> None:
    heard = Heard(owner, stream([1, 2]))
    heard.wait(3)
    kill(owner)
    owner.cancel_request(heard.request_id)
    tokens = heard.tokens()
    assert len(tokens) < 100 and tokens == oracle([1, 2], len(tokens), 1000)
    assert heard.responses[-1].result.finish_reasons[0].name == "CANCELLED"


def test_what_is_left_of_a_deadline_is_what_the_next_engine_grants(owner: Executor) -> None:
    heard = Heard(owner, stream([1, 2], 2000, timeout_s=1.0))
    heard.wait(3)
    started = time.monotonic()
    kill(owner)
    tokens = heard.tokens()
    assert time.monotonic() - started < 6 and len(tokens) < 2000
    assert heard.responses[-1].result.finish_reasons[0].name == "TIMED_OUT"


def test_clients_of_another_process_hold_their_streams_too_and_ids_may_change(owner: Executor, tmp_path: Path) -> None:
    guests = [Executor.attach(str(tmp_path / "run" / "engine.sock"), 5) for _ in range(3)]
    everybody = [owner, *guests]
    heard = [Heard(each, stream([i, 3], 150)) for i, each in enumerate(everybody)]
    for each in heard:
        each.wait(3)
    kill(owner)
    for i, each in enumerate(heard):
        assert each.tokens() == oracle([i, 3], 150, 1000)
        assert {response.request_id for response in each.responses} == {each.request_id}
    for guest in guests:
        guest.shutdown()


def test_who_does_not_want_to_wait_gets_unavailable(launch: Callable[..., Executor]) -> None:
    owner = launch(msgspec.structs.replace(POOL, triton=TritonConfig(resume_requests=False)))
    heard = Heard(owner, stream([1, 2], 1000))
    heard.wait(3)
    kill(owner)
    assert heard.done.wait(10) and heard.responses[-1].error_code is ErrorCode.UNAVAILABLE


def test_a_poison_request_ends_alone_and_all_others_go_on(owner: Executor) -> None:
    """Two ends of the engine with all of them, and one with it alone: then it is told so, and the engine is not given up."""
    others = [Heard(owner, stream([i, 9], 400)) for i in range(1, 4)]
    for each in others:
        each.wait(2)
    poison = Heard(owner, stream([KILLS, 1]))
    assert poison.done.wait(30)
    error = poison.responses[-1]
    assert (
        error.error_code is ErrorCode.INTERNAL
        and "ended 3 times while this request ran, the last time alone" in error.error_msg
    )
    for i, each in enumerate(others, start=1):
        assert each.tokens() == oracle([i, 9], 400, 1000)
    assert owner._process.num_deaths == 3 and len(owner._process._back_off._ends) == 1


def test_sessions_go_on_from_their_log_and_a_turn_in_flight_is_run_on_top_of_it(owner: Executor) -> None:
    heard = Heard(owner, stream([1, 2], 60, session=SessionConfig(7, start=True)))
    heard.wait(10)
    kill(owner)
    first = heard.tokens()
    assert first == oracle([1, 2], 60, 1000)
    kill(owner)
    assert wait_until(owner.is_ready, 10)
    heard = Heard(owner, stream([3], 40, session=SessionConfig(7)))
    heard.wait(10)
    kill(owner)
    second = heard.tokens()
    assert second == oracle([1, 2, *first, 3], 40, 1000, counter=60)
    third = Heard(
        owner, Request([4], 20, output_config=OutputConfig(exclude_input_from_output=True), session=SessionConfig(7))
    )
    time.sleep(0.02)
    kill(owner)
    assert third.tokens() == oracle([1, 2, *first, 3, *second, 4], 20, 1000, counter=100)


def test_an_erased_session_does_not_come_back(owner: Executor) -> None:
    for session in (7, 8):
        Heard(owner, stream([session, 2], 5, session=SessionConfig(session, start=True))).tokens()
    Heard(owner, stream([9], 5, session=SessionConfig(7, end=True))).tokens()
    stopped = threading.Event()
    owner.stop_session(8, True, lambda response: stopped.set())
    assert stopped.wait(10)
    Heard(owner, stream([1], 5)).tokens()
    kill(owner)
    assert wait_until(owner.is_ready, 10)
    for session in (7, 8):
        refused = Heard(owner, stream([9], 5, session=SessionConfig(session)))
        assert refused.done.wait(10) and "is not known" in refused.responses[0].error_msg


def test_a_stop_that_was_in_flight_ends_the_turn_with_the_next_engine(owner: Executor) -> None:
    heard = Heard(owner, stream([1, 2], 500, session=SessionConfig(7, start=True)))
    heard.wait(5)
    answers: list[Response] = []
    os.kill(owner._process.pid, signal.SIGSTOP)
    owner.stop_session(7, False, answers.append)
    kill(owner)
    tokens = heard.tokens()
    assert tokens == oracle([1, 2], len(tokens), 1000) and len(tokens) < 500
    assert wait_until(lambda: len(answers) == 1, 10) and not answers[0].has_error()
