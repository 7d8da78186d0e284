"""The pump alone: order, coalescing, exactly one FINAL on the last response that says something."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.api import ErrorCode, FinishReason, RequestId, Response, Result
from backend.serving import pb
from backend.serving.delivery.pump import ResponsePump
from backend.serving.stream import OutputRow, Stream
from backend.serving.wires.trtllm_outputs import RowSettings, token_output
from tests.serving.fake_triton import ResponseSender, TritonModelException
from tests.serving.scripted import NoEngineRows


class Harness:
    """A pump whose calls back into the engine are recorded."""

    def __init__(self, num_lanes: int = 4) -> None:
        self.stopped: list[Stream] = []
        self.ended: list[OutputRow] = []
        self.responses: list[Response] = []  # with which they ended
        self.pump = ResponsePump(num_lanes, NoEngineRows(self.stopped.append), self._note)

    def _note(self, stream: Stream, row: OutputRow, response: Response) -> None:
        self.ended.append(row)
        self.responses.append(response)

    def open(
        self, num_rows: int = 1, streaming: bool = True, prompt: tuple[int, ...] = ()
    ) -> tuple[Stream, ResponseSender]:
        rows = [
            OutputRow(token_output(RowSettings(streaming, batch_index=n if num_rows > 1 else None), list(prompt)))
            for n in range(num_rows)
        ]
        sender = ResponseSender()
        return self.pump.open(sender, "r", rows), sender

    def tokens(self, stream: Stream, *ids: int, row: int = 0, final: bool = False) -> None:
        reason = FinishReason.LENGTH if final else FinishReason.NOT_FINISHED
        result = Result([list(ids)], is_final=final, finish_reasons=[reason])
        self.pump.deliver(stream, stream.rows[row], Response(RequestId(row + 1), result_or_none=result))

    def error(self, stream: Stream, message: str, row: int = 0) -> None:
        response = Response(RequestId(row + 1), error_or_none=message, error_code=ErrorCode.UNAVAILABLE)
        self.pump.deliver(stream, stream.rows[row], response)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def make() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(num_lanes: int = 4) -> Harness:
        made.append(Harness(num_lanes))
        return made[-1]

    yield build
    for harness in made:
        harness.pump.close()
        assert harness.pump.live_streams() == []


def test_tokens_arrive_in_order_and_final_rides_on_the_last_of_them(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open()
    for n in range(50):
        harness.tokens(stream, n, final=n == 49)
    sender.wait()
    assert sender.column("output_ids") == list(range(50))
    assert sender.finals == [len(sender.sent) - 1]
    assert all(response.outputs()["output_ids"].shape[:2] == (1, 1) for response in sender.wait())


def test_what_arrives_during_a_send_joins_the_next_response(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open()
    sender.gate = threading.Event()
    harness.tokens(stream, 0)
    assert sender.entered.acquire(timeout=10)  # the first send is in flight
    for n in range(1, 10):
        harness.tokens(stream, n)
    harness.tokens(stream, 10, final=True)
    sender.gate.set()
    responses = sender.wait()
    assert [response.outputs()["output_ids"].size for response in responses] == [1, 10]
    assert sender.column("sequence_length") == [1, 10] and sender.finals == [1]


def test_one_slow_stream_does_not_hold_up_those_of_other_lanes(make: Callable[..., Harness]) -> None:
    harness = make(num_lanes=2)
    slow, slow_sender = harness.open()
    slow_sender.gate = threading.Event()
    harness.tokens(slow, 1)
    assert slow_sender.entered.acquire(timeout=10)
    quick, quick_sender = harness.open()
    harness.tokens(quick, 2, final=True)
    assert len(quick_sender.wait()) == 1
    harness.tokens(slow, 3, final=True)
    slow_sender.gate.set()
    slow_sender.wait()


def test_without_streaming_there_is_one_response_with_the_prompt_in_front(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open(streaming=False, prompt=(7, 8))
    harness.tokens(stream, 1)
    harness.tokens(stream, 2, final=True)
    assert (
        len(sender.wait()) == 1
        and sender.column("output_ids") == [7, 8, 1, 2]
        and sender.column("sequence_length") == [4]
    )


def test_an_end_without_tokens_is_still_a_response_with_data(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open()
    harness.tokens(stream, final=True)
    (response,) = sender.wait()
    assert response.outputs()["output_ids"].shape == (1, 1, 0) and sender.column("sequence_length") == [0]


def test_a_result_without_tokens_in_the_middle_is_not_sent(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open()
    harness.tokens(stream)
    harness.tokens(stream, 5, final=True)
    assert all(response.outputs()["output_ids"].size for response in sender.wait())


@pytest.mark.feature("001-06")
def test_an_error_of_a_row_waits_for_the_other_rows_and_is_the_last_response(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open(num_rows=2)
    harness.tokens(stream, 1, row=0)
    harness.error(stream, "no more memory", row=0)
    harness.tokens(stream, 2, row=0)  # after its end: ignored
    harness.tokens(stream, 3, row=1)
    until(lambda: any(3 in r.outputs().get("output_ids", np.array([])) for r, _ in list(sender.sent)))
    harness.tokens(stream, row=1, final=True)
    responses = sender.wait()
    assert [response.has_error() for response in responses[:-1]] == [False] * (len(responses) - 1)
    assert sender.error() == "[UNAVAILABLE] row 0: no more memory" and sender.finals == [len(responses) - 1]
    assert sender.column("output_ids") == [1, 3]
    assert [stream.rows.index(row) for row in harness.ended] == [0, 1], "each row ends once"


def test_rows_that_failed_share_one_error_with_the_code_of_the_first(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open(num_rows=4)
    harness.error(stream, "gone", row=2)
    harness.tokens(stream, 7, row=1, final=True)
    harness.error(stream, "gone", row=3)
    bad = Response(RequestId(1), error_or_none="too long", error_code=ErrorCode.INVALID_ARGUMENT)
    harness.pump.deliver(stream, stream.rows[0], bad)
    assert sender.error() == "[UNAVAILABLE] row 0: too long; rows 2, 3: gone"
    assert sum(response.has_error() for response in sender.wait()) == 1 and sender.column("output_ids") == [7]


def test_what_a_row_said_before_its_error_is_sent_before_it(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open()
    sender.gate = threading.Event()
    harness.tokens(stream, 1)
    assert sender.entered.acquire(timeout=10)
    harness.tokens(stream, 2)
    harness.error(stream, "the engine is gone")
    sender.gate.set()
    assert sender.error() == "[UNAVAILABLE] the engine is gone" and sender.column("output_ids") == [1, 2]


def test_an_error_text_that_no_utf8_can_hold_still_ends_the_stream(make: Callable[..., Harness]) -> None:
    harness = make()
    row_error, row_sender = harness.open()
    harness.error(row_error, "the role \ud800 is not known")
    assert row_sender.error() == "[UNAVAILABLE] the role ? is not known"
    refused, refused_sender = harness.open(num_rows=0)
    harness.pump.fail(refused, ErrorCode.INVALID_ARGUMENT, "the role \udfff is not known")
    assert refused_sender.error() == "[INVALID_ARGUMENT] the role ? is not known"


def test_an_error_that_cannot_even_be_built_becomes_a_bare_end(
    make: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    stream, sender = harness.open()
    monkeypatch.setattr(pb, "error_response", lambda code, message: 1 / 0)
    harness.pump.fail(stream, ErrorCode.INTERNAL, "broken")
    assert sender.wait() == [None] and sender.finals == [0]


def test_a_refusal_does_not_wait_behind_a_stream(make: Callable[..., Harness]) -> None:
    harness = make(num_lanes=1)
    slow, slow_sender = harness.open()
    slow_sender.gate = threading.Event()
    harness.tokens(slow, 1, final=True)
    assert slow_sender.entered.acquire(timeout=10)  # the only lane is in a send
    refused, refused_sender = harness.open(num_rows=0)
    harness.pump.refuse(refused, ErrorCode.UNAVAILABLE, "full")
    assert refused_sender.error() == "[UNAVAILABLE] full"
    assert harness.pump.begin(refused, [OutputRow(token_output(RowSettings(), []))]) is False and refused.rows == []
    slow_sender.gate.set()


def test_a_stream_that_was_cancelled_gets_no_rows(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open(num_rows=0)
    stream.cancelled = True
    assert harness.pump.begin(stream, [OutputRow(token_output(RowSettings(), []))]) is False and stream.rows == []
    harness.pump.fail(stream, ErrorCode.CANCELLED, "stopped")
    assert sender.error() == "[CANCELLED] stopped"


def test_a_failure_of_the_stream_ends_it_once_and_stops_its_rows(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open(num_rows=2)
    harness.pump.fail(stream, ErrorCode.UNAVAILABLE, "shutting down")
    harness.pump.fail(stream, ErrorCode.INTERNAL, "another")
    harness.tokens(stream, 1, final=True)
    assert sender.error() == "[UNAVAILABLE] shutting down"
    harness.pump.close()
    assert len(sender.sent) == 1 and harness.stopped == [stream]


def test_a_send_that_fails_ends_the_stream_once_with_an_error(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open()
    sender.failures = [TritonModelException("Failed to increase the shared memory pool size for key 'secret'")]
    harness.tokens(stream, 1)
    message = sender.error()
    assert "could not send" in message and "secret" not in message
    harness.tokens(stream, 2, final=True)
    harness.pump.close()
    assert sender.finals == [0] and len(sender.sent) == 1 and harness.stopped == [stream]


def test_when_the_error_cannot_be_sent_either_a_bare_end_is_tried(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open()
    sender.failures = [TritonModelException("full"), TritonModelException("full")]
    harness.tokens(stream, 1, final=True)
    assert sender.wait() == [None] and sender.attempts == 3


def test_a_closed_sender_is_left_alone(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open()
    sender.failures = [TritonModelException("x"), TritonModelException("Response sender has been closed.")]
    harness.tokens(stream, 1, final=True)
    harness.pump.close()
    assert sender.attempts == 2 and harness.pump.live_streams() == []


def test_an_output_that_cannot_be_rendered_ends_the_stream_and_not_the_lane(make: Callable[..., Harness]) -> None:
    harness = make(num_lanes=1)
    stream, sender = harness.open()
    stream.rows[0].output.render = lambda final: 1 / 0
    harness.tokens(stream, 1)
    assert sender.error() == "[INTERNAL] the answer could not be built; see the server's log"
    healthy, healthy_sender = harness.open()
    harness.tokens(healthy, 5, final=True)
    assert healthy_sender.column("output_ids") == [5]


def test_a_stream_whose_client_is_gone_sends_its_end_alone(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open()
    stream.abandoned = True
    harness.tokens(stream, 1)
    harness.tokens(stream, 2)
    harness.tokens(stream, final=True)
    assert len(sender.wait()) == 1 and sender.finals == [0]


# What may happen to a row: tokens, then an end (or an error), then, wrongly, more.
EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(["tokens", "tokens", "tokens", "end", "error"])),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    EVENTS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([None, None, 3, 10]), st.sampled_from([None, None, 2])
)
def test_each_stream_ends_exactly_once_whatever_happens_in_whatever_order(
    events: list[tuple[int, int, str]], num_streams: int, num_rows: int, fail_after: int | None, break_send: int | None
) -> None:
    harness = Harness(num_lanes=2)
    streams = [harness.open(num_rows) for _ in range(num_streams)]
    if break_send is not None:
        streams[0][1].failures = [TritonModelException("full")] * break_send
    expected: dict[tuple[int, int], list[int]] = defaultdict(list)
    over: set[tuple[int, int]] = set()
    for n, (s, r, what) in enumerate(events):
        key = (s % num_streams, r % num_rows)
        stream = streams[key[0]][0]
        if fail_after == n:
            harness.pump.fail(stream, ErrorCode.CANCELLED, "gone")
        if what == "error":
            harness.error(stream, "broken", row=key[1])
        else:
            harness.tokens(stream, n, row=key[1], final=what == "end")
        if key not in over and what != "error":
            expected[key].append(n)
        if what != "tokens":
            over.add(key)
    for stream, _ in streams:  # the engine ends every row at last
        for r in range(num_rows):
            harness.tokens(stream, row=r, final=True)
    harness.pump.close()
    assert harness.pump.live_streams() == []
    for s, (stream, sender) in enumerate(streams):
        assert sender.finals == [len(sender.sent) - 1], "exactly one FINAL, on the last response"
        responses = [response for response, _ in sender.sent]
        assert all(r is None or r.has_error() or "output_ids" in r.outputs() for r in responses)
        assert None not in responses[:-1], "nothing but a last resort is bare"
        assert not any(r.has_error() for r in responses[:-1]), "an error is the last thing that is said"
        got: dict[int, list[int]] = defaultdict(list)
        for response in responses:
            if response is not None and not response.has_error():
                outputs = response.outputs()
                got[int(outputs["batch_index"][0, 0]) if num_rows > 1 else 0] += (
                    outputs["output_ids"].reshape(-1).tolist()
                )
        broken = stream.failure is not None or (break_send is not None and s == 0)
        for r in range(num_rows):
            whole = expected[s, r]
            assert got[r] == whole or (broken and got[r] == whole[: len(got[r])]), "tokens are complete and in order"


def test_a_row_of_a_stream_that_has_ended_is_noted_when_the_engine_ends_it(make: Callable[..., Harness]) -> None:
    harness = make()
    stream, sender = harness.open(num_rows=2)
    harness.tokens(stream, 1, row=0, final=True)
    until(lambda: bool(harness.ended))
    harness.pump.fail(stream, ErrorCode.UNAVAILABLE, "shutting down")
    sender.wait()
    harness.tokens(stream, 2, row=1)
    harness.tokens(stream, 3, row=1, final=True)
    harness.tokens(stream, 3, row=1, final=True)
    until(lambda: len(harness.ended) == 2)
    assert [stream.rows.index(row) for row in harness.ended] == [0, 1]
    assert [response.is_final for response in harness.responses] == [True, True]


def test_a_row_whose_end_arrives_with_the_failure_of_its_stream_is_noted(make: Callable[..., Harness]) -> None:
    harness = make(num_lanes=1)
    busy, busy_sender = harness.open()
    busy_sender.gate = threading.Event()
    harness.tokens(busy, 1)
    assert busy_sender.entered.acquire(timeout=10)  # the only sender thread is occupied
    stream, sender = harness.open()
    harness.tokens(stream, 1, final=True)
    harness.pump.fail(stream, ErrorCode.UNAVAILABLE, "shutting down")
    busy_sender.gate.set()
    sender.wait()
    until(lambda: harness.ended == stream.rows)
    harness.tokens(busy, final=True)
    busy_sender.wait()
