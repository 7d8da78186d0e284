"""Model `turbomind`: defaults of TurboMind, cumulative outputs, numbered errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backend.api import (
    EngineConfig,
    ErrorCode,
    FinishReason,
    InvalidRequest,
    OutputConfig,
    Request,
    Result,
    SessionConfig,
    SessionError,
    Unsupported,
)
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.server import ModelServer
from backend.serving.tensors import NUMPY_TYPES
from backend.serving.wires.turbomind import OWN_SESSIONS, TURBOMIND, error_text
from backend.serving.wires.turbomind_outputs import TurbomindOutput
from backend.serving.work import RowOutput, StopSession, Work
from tests.serving.fake_triton import InferenceRequest, Tensor
from tests.serving.scripted import ScriptedExecutor

MODEL = ModelInfo("m", vocab_size=100, max_seq_len=32, eos_ids=(9,))


def arrays(prompt: list[int], max_tokens: int = 4, **fields: Any) -> dict[str, np.ndarray]:
    """As LMDeploy's client sends them: each [1, n] of the declared type."""
    specs = TURBOMIND.tensors.by_name()
    values = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": max_tokens, **fields}
    return {
        name: np.array(value, NUMPY_TYPES[specs[name].dtype]).reshape(1, *np.shape(value) or (1,))
        for name, value in values.items()
    }


def work(prompt: list[int] = [1, 2], **fields: Any) -> Work:  # noqa: B006, it is only read
    tensors = [Tensor(name, array) for name, array in arrays(prompt, **fields).items()]
    context = ServingContext(EngineConfig(), MODEL)
    (only,) = TURBOMIND.parse(Batch.read(TURBOMIND.tensors, tensors, 64), context, Parameters(2.5, "mine"))
    return only


def asked(prompt: list[int] = [1, 2], **fields: Any) -> Request:  # noqa: B006, it is only read
    request = work(prompt, **fields).request
    assert isinstance(request, Request)
    return request


def told(output: RowOutput) -> dict[str, Any] | None:
    found = next(iter(output.render()), None)
    return None if found is None else {name: array.tolist() for name, array in found}


@pytest.mark.feature("W-09", "004-29")
def test_the_inputs_of_a_turn_reach_the_engine() -> None:
    request = asked([5, 6, 7], max_tokens=3, START=0, END=0, CORRID=12, step=40, session_len=2048, random_seed=8)
    assert request.input_token_ids == [5, 6, 7] and request.max_tokens == 3 and request.streaming
    assert request.output_config == OutputConfig(return_history=True)
    assert request.session == SessionConfig(12, start=False, end=False, step=40, session_len=2047)
    assert request.sampling_config.seed == 8 and request.end_ids == (9,)
    assert (request.timeout_s, request.cache_salt) == (2.5, "mine")
    assert asked(max_tokens=0, session_len=2048).session.session_len == 2048
    words = [[[4, 5, 6], [1, 3, -1]]]
    lists = asked(stop_words_list=words[0], bad_words_list=words[0], end_id=3)
    assert lists.stop_words == lists.bad_words == [[4], [5, 6]] and lists.end_ids == (3,)
    assert asked(end_id=(1 << 32) - 1).end_ids == ()


def test_a_client_that_bans_the_end_of_the_text_wants_output_of_full_length() -> None:
    assert asked(bad_words_list=[[9], [1]]).end_ids == ()
    assert asked(bad_words_list=[[9, 8], [2, -1]]).end_ids == (9,), "a word that only begins with it is another word"


@pytest.mark.feature("W-09")
def test_what_is_left_out_has_turbominds_defaults() -> None:
    session = asked().session
    assert session is not None and session.start and session.end and session.step is None
    assert session.session_len is None and asked(session_len=0).session.session_len is None
    assert asked(END=0).session.id == 0 == asked(START=0).session.id
    assert asked(CORRID=3).session.id == 3


def test_requests_that_begin_and_end_their_session_and_name_none_do_not_collide() -> None:
    ids = {asked().session.id for _ in range(20)}
    assert len(ids) == 20 and min(ids) >= OWN_SESSIONS


@pytest.mark.parametrize(
    ("fields", "is_greedy"),
    [
        ({}, True),
        ({"temperature": 0.8}, True),
        ({"temperature": 0.8, "runtime_top_k": 0, "runtime_top_p": 0.0}, True),
        ({"temperature": 0.8, "runtime_top_k": 40}, False),
        ({"runtime_top_p": 0.8}, False),
    ],
)
def test_without_top_k_and_top_p_decoding_is_greedy(fields: dict[str, float], is_greedy: bool) -> None:
    assert asked(**fields).sampling_config.is_greedy == is_greedy


@pytest.mark.feature("004-28")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 2}, "beam_width asks for beam search"),
        ({"len_penalty": 0.5}, "len_penalty asks for beam search"),
        ({"beam_search_diversity_rate": 0.5}, "beam_search_diversity_rate asks for beam search"),
        ({"prompt_learning_task_name_ids": 3}, "prompt_learning_task_name_ids asks for prompt tuning"),
        ({"input_embeddings": [1, 2]}, "input_embeddings asks for embeddings"),
    ],
)
def test_what_is_not_built_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        work(**fields)


def test_top_p_decays_only_where_a_decay_is_given() -> None:
    decay = {"runtime_top_p": 0.5, "top_p_min": 0.25, "top_p_reset_ids": 7}
    config = asked(**decay, top_p_decay=0.75).sampling_config
    assert (config.top_p, config.top_p_decay, config.top_p_min, config.top_p_reset_ids) == (0.5, 0.75, 0.25, 7)
    for value in (0.0, 1.0):
        assert asked(**decay, top_p_decay=value).sampling_config == asked(runtime_top_p=0.5).sampling_config
    unset = asked(runtime_top_p=0.5, top_p_decay=0.75, top_p_min=0.0, top_p_reset_ids=2**32 - 1).sampling_config
    assert (unset.top_p_min, unset.top_p_reset_ids) == (None, None)


def test_neutral_values_of_what_is_not_built_pass() -> None:
    assert asked(beam_width=1, len_penalty=1.0, beam_search_diversity_rate=0.0, top_p_decay=1.0, start_id=1)


def test_bad_input_is_refused_naming_the_value() -> None:
    with pytest.raises(InvalidRequest, match="input_ids holds 100, allowed is 0 to 99"):
        work([100])
    with pytest.raises(SessionError, match=r"session error 6 \(too_long\): the prompt has 32 tokens, the limit is 31"):
        work([1] * 32)
    assert asked([1] * 32, max_tokens=0).max_tokens == 0


def test_stop_interrupts_the_session_and_end_that_is_left_out_erases_it() -> None:
    assert work(STOP=1, CORRID=4, START=0, END=0).request == StopSession(4, end=False, namespace="mine")
    assert work(STOP=1).request == StopSession(0, end=True, namespace="mine")
    with pytest.raises(SessionError, match="session error 1"):
        work(STOP=1, START=1, CORRID=4)
    output = work(STOP=1, CORRID=4).output
    output.feed(Result([[]], is_final=True, finish_reasons=(FinishReason.CANCELLED,)))
    assert told(output) == {"output_ids": [[[]]], "sequence_length": [[0]]}


@pytest.mark.feature("W-09")
def test_every_response_holds_history_prompt_and_output() -> None:
    output = work([5, 6], START=0, END=0).output
    assert told(output) is None
    output.feed(Result([[7]], history_token_ids=[1, 2, 3]))
    assert told(output) == {"output_ids": [[[1, 2, 3, 5, 6, 7]]], "sequence_length": [[6]]}
    assert told(output) is None
    output.feed(Result([[8]]))
    output.feed(Result([[9]], is_final=True, finish_reasons=(FinishReason.END_ID,)))
    assert told(output) == {"output_ids": [[[1, 2, 3, 5, 6, 7, 8, 9]]], "sequence_length": [[8]]}
    assert output.num_output_tokens == 3
    assert [array.dtype for _, array in output.render()[0]] == [np.uint32, np.uint32]


def test_a_turn_without_output_tells_history_and_prompt() -> None:
    output = work([5, 6], START=0, END=0).output
    output.feed(Result([[]], is_final=True, finish_reasons=(FinishReason.LENGTH,), history_token_ids=[1]))
    assert told(output) == {"output_ids": [[[1, 5, 6]]], "sequence_length": [[3]]}
    assert output.num_output_tokens == 0


def test_log_probabilities_are_those_of_all_output_so_far() -> None:
    assert asked(is_return_log_probs=True).output_config.return_log_probs
    output = TurbomindOutput([5])
    output.feed(Result([[7]], log_probs=[[-0.5]], history_token_ids=[]))
    output.feed(Result([[8]], log_probs=[[-0.25]]))
    found = told(output)
    assert found is not None
    assert found["output_log_probs"] == [[[-0.5, -0.25]]] and found["cum_log_probs"] == [[-0.75]]


@pytest.mark.parametrize(("step", "warned"), [(3, False), (4, True)])
def test_a_step_beyond_the_session_is_warned_about(step: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    output = work([5], START=0, END=0, CORRID=77, step=step).output
    with caplog.at_level(logging.WARNING, "everbatch.serving"):
        output.feed(Result([[7]], history_token_ids=[1, 2, 3]))
    assert (f"session 77: step is {step}, the session has 3 tokens" in caplog.text) == warned


@pytest.mark.feature("004-30", "W-09")
@pytest.mark.parametrize(
    ("code", "message", "number"),
    [
        (ErrorCode.INVALID_ARGUMENT, "session error 3 (busy): session 4 is running a turn", 3),
        (ErrorCode.UNAVAILABLE, "session error 5 (fail): the engine ended", 5),
        (ErrorCode.INVALID_ARGUMENT, "input_ids holds 100", 1),
        (ErrorCode.UNSUPPORTED, "beam_width asks for beam search", 1),
        (ErrorCode.UNAVAILABLE, "the engine is not ready yet", 5),
    ],
)
def test_errors_carry_turbominds_numbers(code: ErrorCode, message: str, number: int) -> None:
    assert error_text(code, message) == f"[{code}] TurboMind execute failure: {number}: {message}"


def test_the_server_puts_the_number_in_front_of_an_engines_error(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    server = make_server(TURBOMIND.tensors, TURBOMIND.parse, dialect=TURBOMIND.dialect)
    refused, failed = InferenceRequest(arrays([100])), InferenceRequest(arrays([1, 2], CORRID=4))
    server.execute([refused, failed])
    executor.error(1, "session error 3 (busy): wait", ErrorCode.INVALID_ARGUMENT)
    assert failed.sender.error() == "[INVALID_ARGUMENT] TurboMind execute failure: 3: session error 3 (busy): wait"
    assert refused.sender.error().startswith("[INVALID_ARGUMENT] TurboMind execute failure: 1: input_ids holds 100")
