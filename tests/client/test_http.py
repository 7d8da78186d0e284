"""Server-sent events to chunks, and what a client refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from client import http_messages
from client.client import EverbatchClient
from client.errors import ClientError
from client.http_messages import _error_text, code_in, decode_answer, parse_event, with_final_mark
from client.messages import TextChunk


def test_an_event_is_a_chunk_and_blank_lines_are_nothing() -> None:
    answer = parse_event(b'data: {"model_name":"ensemble","text_output":"a\\n","num_output_tokens":1}\n')
    assert answer is not None
    assert decode_answer(answer, final=False) == TextChunk("a\n", num_output_tokens=1)
    assert parse_event(b"\n") is None


def test_several_elements_arrive_as_a_list() -> None:
    assert decode_answer({"output_log_probs": [-1.0, -2.0], "text_output": "x"}, False).log_probs == [-1.0, -2.0]


def test_an_error_event_raises_with_the_code_it_names() -> None:
    with pytest.raises(ClientError) as caught:
        parse_event(b'data: {"error":"[UNAVAILABLE] queue full"}\n')
    assert caught.value.code == "UNAVAILABLE" and "queue full" in str(caught.value)


@pytest.mark.parametrize(
    ("message", "code"), [("[INVALID_ARGUMENT] x", "INVALID_ARGUMENT"), ("[1,2] x", "UNKNOWN"), ("x", "UNKNOWN")]
)
def test_a_code_is_read_only_where_one_is(message: str, code: str) -> None:
    assert code_in(message) == code


@pytest.mark.parametrize("body", ['{"error":"why"}', 'data: {"error":"why"}', "why"])
def test_the_reason_is_found_in_every_form_of_error_body(body: str) -> None:
    assert _error_text(body) == "why"


def test_the_chunk_with_a_finish_reason_is_the_final_one() -> None:
    marked = list(with_final_mark(iter([TextChunk("a"), TextChunk("b", finish_reason="stop")])))
    assert [chunk.final for chunk in marked] == [False, True]


def test_without_a_finish_reason_the_end_of_the_stream_is_the_final_chunk() -> None:
    marked = list(with_final_mark(iter([TextChunk("a"), TextChunk("b")])))
    assert "".join(chunk.text for chunk in marked) == "ab"
    assert [chunk.final for chunk in marked][-1] is True and sum(chunk.final for chunk in marked) == 1
    assert list(with_final_mark(iter([]))) == [TextChunk("", final=True)]


def test_the_last_of_several_ends_is_the_final_one() -> None:
    ends = [TextChunk("a", finish_reason="stop"), TextChunk("b"), TextChunk("", finish_reason="length")]
    assert [chunk.final for chunk in with_final_mark(iter(ends), 2)] == [False, False, True]


def test_text_is_not_held_back_until_the_next_chunk() -> None:
    def chunks() -> Iterator[TextChunk]:
        yield TextChunk("a")
        pytest.fail("the second chunk was asked for before the first was handed over")

    assert next(with_final_mark(chunks())).text == "a"


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="'ftp'"):
        EverbatchClient(protocol="ftp")  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_client_knows_its_namespace_and_refuses_one_that_is_too_long(protocol: Literal["grpc", "http"]) -> None:
    with EverbatchClient(None, protocol, namespace="alice") as client:
        assert client.namespace == "alice"
    with pytest.raises(ValueError, match="257 characters"):
        EverbatchClient(None, protocol, namespace="n" * 257)


def test_a_wrong_request_is_refused_before_anything_is_sent() -> None:
    with EverbatchClient("http://127.0.0.1:1", "http") as client, pytest.raises(ValueError, match="max_tokens is -1"):
        client.stream("x", max_tokens=-1)


def test_each_status_has_its_code() -> None:
    assert http_messages._CODES == {
        404: "NOT_FOUND",
        413: "INVALID_ARGUMENT",
        429: "UNAVAILABLE",
        502: "UNAVAILABLE",
        503: "UNAVAILABLE",
        504: "DEADLINE_EXCEEDED",
    }


def test_a_model_that_is_being_unloaded_is_unavailable_and_one_that_there_is_not_is_not_found() -> None:
    assert code_in("Request for unknown model: 'a' has no available versions") == "UNAVAILABLE"
    assert code_in("Request for unknown model: 'a' is not found") == "NOT_FOUND"
