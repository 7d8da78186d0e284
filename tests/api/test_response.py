"""A Response is either a Result or an error, and reading the wrong one raises."""

from __future__ import annotations

import msgspec
import pytest

from backend.api import ErrorCode, FinishReason, Request, Response, Result, SessionConfig


@pytest.mark.feature("000-22")
def test_an_error_has_no_result() -> None:
    response = Response(7, error_or_none="too long", error_code=ErrorCode.INVALID_ARGUMENT)
    assert response.has_error() and response.is_final and response.error_msg == "too long"
    with pytest.raises(ValueError, match="request 7 is an error: too long; read error_msg"):
        _ = response.result


@pytest.mark.feature("000-22")
def test_a_result_has_no_error_message() -> None:
    response = Response(7, result_or_none=Result([[1, 2]]))
    assert not response.has_error() and not response.is_final and response.result.output_token_ids == [[1, 2]]
    with pytest.raises(ValueError, match="request 7 is no error; read result"):
        _ = response.error_msg


@pytest.mark.feature("000-22")
@pytest.mark.parametrize("is_final", [False, True])
def test_a_response_is_final_when_its_result_is(is_final: bool) -> None:
    assert Response(7, result_or_none=Result([[1]], is_final=is_final)).is_final is is_final


def test_responses_and_requests_survive_the_wire() -> None:
    response = Response(7, 3, Result([[1]], True, finish_reasons=(FinishReason.STOP_WORDS,), log_probs=[[-0.5]]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(response), type=Response) == response
    request = Request([1], 2, stop_words=[[3]], end_ids=(4,), session=SessionConfig(9, start=True, step=0))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


def test_every_finish_reason_has_a_name_for_openai_clients() -> None:
    names = {reason: reason.openai_name for reason in FinishReason}
    assert names.pop(FinishReason.NOT_FINISHED) is None
    assert set(names.values()) == {"stop", "length", "timeout", "cancelled"}
