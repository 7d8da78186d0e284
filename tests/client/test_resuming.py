"""Streams whose server ends in their midst: they go on with what is new, where the client is asked to wait for it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from client.client import EverbatchClient
from client.errors import InvalidArgument, Unavailable, Unreachable
from client.messages import Session, TextChunk
from client.resuming import PAUSE_S, Progress
from client.retry import Retry
from tests.client.servers import grpc_answer, grpc_server
from tests.client.test_retry import WHOLE, Ask, asking, scripted  # noqa: F401

WAITS = Retry(attempts=2, first_pause_s=0.001, resume_s=60)
CUT = [grpc_answer("h")]  # and no end


@pytest.mark.feature("002-34")
def test_a_stream_that_is_cut_goes_on_with_what_is_new(asking: Ask) -> None:  # noqa: F811
    with grpc_server(scripted(CUT, WHOLE)) as server:
        assert asking(server.url, WAITS) == "hi"
    assert len(server.requests) == 2


def test_a_request_that_samples_has_the_same_seed_again(asking: Ask) -> None:  # noqa: F811
    with grpc_server(scripted(CUT, WHOLE)) as server:
        asking(server.url, WAITS, temperature=1.0)
    first, second = server.requests
    assert first.raw_input_contents == second.raw_input_contents


def test_a_server_that_is_not_there_yet_is_looked_for_again(asking: Ask) -> None:  # noqa: F811
    starting = [grpc_answer(error="[UNAVAILABLE] the engine is not ready yet")]
    with grpc_server(scripted(CUT, starting, starting, starting, WHOLE)) as server:
        assert asking(server.url, WAITS) == "hi"


def test_who_does_not_ask_for_it_gets_the_error(asking: Ask) -> None:  # noqa: F811
    with grpc_server(scripted(CUT, WHOLE)) as server, pytest.raises(Unavailable, match="without a final response"):
        asking(server.url)


def test_a_server_that_ends_twice_under_a_request_is_not_asked_a_third_time(asking: Ask) -> None:  # noqa: F811
    with grpc_server(scripted(CUT, CUT, WHOLE)) as server, pytest.raises(Unavailable):
        asking(server.url, WAITS)
    assert len(server.requests) == 2


@pytest.mark.parametrize("error", ["[INVALID_ARGUMENT] no", "[CANCELLED] no"])
def test_other_errors_end_the_stream(asking: Ask, error: str) -> None:  # noqa: F811
    with grpc_server(scripted([*CUT, grpc_answer(error=error)], WHOLE)) as server, pytest.raises(Exception, match="no"):
        asking(server.url, WAITS)
    assert len(server.requests) == 1


def test_a_turn_that_adds_to_its_session_is_not_sent_again() -> None:
    with grpc_server(scripted(CUT, WHOLE)) as server, EverbatchClient(server.url, retry=WAITS) as client:
        with pytest.raises(Unavailable):
            list(client.stream("x", session=Session(1, full_history=False)))
    assert len(server.requests) == 1


def chunks_of(progress: Progress, *chunks: TextChunk) -> list[TextChunk]:
    progress.begin()
    return [new for chunk in chunks if (new := progress.take(chunk)) is not None]


def test_each_sequence_goes_on_where_it_was_whatever_shares_a_chunk() -> None:
    progress = Progress()
    one = TextChunk("ab", num_output_tokens=2, log_probs=[-1.0, -2.0])
    other = TextChunk("xyz", num_output_tokens=1, sequence=1, log_probs=[-3.0])
    assert chunks_of(progress, one, other) == [one, other]
    again = TextChunk("abc", num_output_tokens=3, log_probs=[-1.0, -2.0, -4.0])
    last = TextChunk("xyzw", True, "stop", 2, sequence=1, log_probs=[-3.0, -5.0])
    assert chunks_of(progress, again, last) == [
        TextChunk("c", num_output_tokens=1, log_probs=[-4.0]),
        TextChunk("w", True, "stop", 1, sequence=1, log_probs=[-5.0]),
    ]


def test_an_end_that_adds_nothing_is_told() -> None:
    progress = Progress()
    chunks_of(progress, TextChunk("a", num_output_tokens=1))
    end = TextChunk("a", True, "length", 1)
    assert chunks_of(progress, end) == [TextChunk("", True, "length", 0)]


def test_of_beams_the_chunks_that_have_come_are_left_out() -> None:
    progress = Progress()
    beams = [TextChunk("a" * n, texts=("a" * n, "b")) for n in (1, 2, 3)]
    assert chunks_of(progress, *beams[:2]) == beams[:2]
    assert chunks_of(progress, *beams) == beams[2:]


def test_the_wait_is_bounded() -> None:
    progress = Progress()
    chunks_of(progress, TextChunk("a"))
    assert progress.pause_s(Unavailable("the connection to x broke: y"), 5.0, 100.0) == PAUSE_S
    progress.begin()
    assert progress.pause_s(Unreachable("no server answers"), 5.0, 104.0) == PAUSE_S
    assert progress.pause_s(Unreachable("no server answers"), 5.0, 105.0) is None
    assert progress.pause_s(InvalidArgument("no"), 5.0, 100.0) is None


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_wait_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match="no negative pauses"):
        Retry(resume_s=seconds)
