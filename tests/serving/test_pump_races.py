"""The pump where two threads meet: the one that refuses and the sender, both of which may want to end a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from backend.api import ErrorCode, FinishReason, RequestId, Response, Result
from backend.serving.delivery.pump import ResponsePump
from backend.serving.stream import OutputRow, Stream
from backend.serving.wires.trtllm_outputs import RowSettings, token_output
from tests.serving.fake_triton import ResponseSender
from tests.serving.scripted import NoEngineRows
from tests.serving.test_pump import until


class Gate:
    """Takes the place of `Stream.gate`, which the poller holds for the time of a round trip; counts who comes to it."""

    def __init__(self) -> None:
        self.num_came = 0
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.num_came += 1
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def row() -> OutputRow:
    return OutputRow(token_output(RowSettings(True), []))


def the_end(request_id: int = 1) -> Response:
    result = Result([[1]], is_final=True, finish_reasons=(FinishReason.LENGTH,))
    return Response(RequestId(request_id), result_or_none=result)


@pytest.fixture
def pump() -> Iterator[ResponsePump]:
    made = ResponsePump(1, NoEngineRows())
    yield made
    made.close()
    assert made.live_streams() == []


def gated(pump: ResponsePump) -> tuple[Stream, ResponseSender, Gate]:
    """A stream without rows, whose end waits at a gate."""
    sender, gate = ResponseSender(), Gate()
    stream = pump.open(sender, "r")
    stream.gate = gate
    return stream, sender, gate


def refusing(pump: ResponsePump, stream: Stream) -> threading.Thread:
    thread = threading.Thread(target=pump.refuse, args=(stream, ErrorCode.INVALID_ARGUMENT, "no"))
    thread.start()
    return thread


def test_a_stream_that_a_sender_is_about_to_end_is_not_refused_as_well(pump: ResponsePump) -> None:
    """The client leaves while its request is taken in, and the request turns out to be wrong."""
    stream, sender, gate = gated(pump)
    pump.fail(stream, ErrorCode.CANCELLED, "gone")
    until(lambda: gate.num_came == 1)  # the sender has taken it, and waits for the poller
    thread = refusing(pump, stream)
    until(lambda: gate.num_came == 2 or not thread.is_alive())
    gate.open()
    thread.join(10)
    pump.close()
    assert sender.attempts == 1 and sender.error() == "[CANCELLED] gone"


def test_what_is_being_refused_is_not_ended_by_a_sender_as_well(pump: ResponsePump) -> None:
    stream, sender, gate = gated(pump)
    thread = refusing(pump, stream)
    until(lambda: gate.num_came == 1)
    pump.fail(stream, ErrorCode.CANCELLED, "gone")
    behind = ResponseSender()  # it is of the same lane: once it is answered, the sender has seen all that came before
    other = pump.open(behind, "other", [row()])
    pump.deliver(other, other.rows[0], the_end())
    until(lambda: gate.num_came == 2 or bool(behind.finals))
    gate.open()
    thread.join(10)
    pump.close()
    assert sender.attempts == 1 and sender.error() == "[INVALID_ARGUMENT] no"


def test_whoever_queues_a_stream_holds_its_lock(pump: ResponsePump, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, held = pump._queue, []
    monkeypatch.setattr(pump, "_queue", lambda stream: (held.append(stream.lock.locked()), queue(stream)))
    streams = [pump.open(ResponseSender(), "r", [row()]) for _ in range(3)]
    pump.answer_stop(streams[0])
    pump.fail(streams[1], ErrorCode.CANCELLED, "gone")
    pump.deliver(streams[2], streams[2].rows[0], the_end())
    pump.refuse(streams[2], ErrorCode.INTERNAL, "no")
    assert held == [True] * 4


def test_a_stream_whose_rows_cannot_be_cancelled_ends_and_its_lane_lives_on() -> None:
    def fail(stream: Stream) -> None:
        raise OSError("the socket is gone")

    pump = ResponsePump(1, NoEngineRows(fail))
    sender, next_sender = ResponseSender(), ResponseSender()
    stream, next_stream = pump.open(sender, "r", [row()]), pump.open(next_sender, "next", [row()])
    pump.fail(stream, ErrorCode.UNAVAILABLE, "the server is shutting down")
    pump.deliver(next_stream, next_stream.rows[0], the_end())
    pump.close()
    assert sender.error() == "[UNAVAILABLE] the server is shutting down" and sender.finals == [0]
    assert next_sender.finals == [0]
