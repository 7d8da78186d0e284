"""Triton 24.10 dies of a segmentation fault when a sender is asked for cancellation after, or while, its FINAL is sent."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest

from backend.api import ErrorCode, FinishReason, RequestId, Response, Result
from backend.serving.delivery.cancellation import CancellationPoller, EngineRows, pause_s
from backend.serving.delivery.pump import ResponsePump
from backend.serving.stream import OutputRow
from backend.serving.wires.trtllm_outputs import RowSettings, token_output
from tests.serving.fake_triton import TRITONSERVER_RESPONSE_COMPLETE_FINAL, InferenceResponse, ResponseSender
from tests.serving.scripted import NoEngineRows


class FragileSender(ResponseSender):
    """Notes every question that Triton would not survive."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = False
        self.asking = False
        self.deadly = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.ending = True
            self.deadly += self.asking
        super().send(response, flags)

    def is_cancelled(self) -> bool:
        self.asking = True
        self.deadly += self.ending
        threading.Event().wait(0.0002)  # a round trip to the server
        self.deadly += self.ending
        self.asking = False
        return False


def test_no_sender_is_asked_once_its_end_is_on_the_way() -> None:
    pump = ResponsePump(4, NoEngineRows())
    poller = CancellationPoller(pump.live_streams, lambda stream: None, period_s=0.0001)
    poller.start()
    senders = [FragileSender() for _ in range(300)]
    for sender in senders:
        stream = pump.open(sender, "r", [OutputRow(token_output(RowSettings(True), []))])
        result = Result([[1]], is_final=True, finish_reasons=(FinishReason.LENGTH,))
        threading.Event().wait(0.0005)  # let the poller look at it before it ends
        pump.deliver(stream, stream.rows[0], Response(RequestId(1), result_or_none=result))
    pump.close()
    poller.stop()
    assert all(sender.ending for sender in senders)
    assert sum(sender.deadly for sender in senders) == 0


def test_a_sender_that_raises_is_survived_and_asked_again() -> None:
    """Triton raises its own type now and then; what it said is no answer, neither yes nor no."""
    answers: list = [RuntimeError("shared memory"), RuntimeError("shared memory"), True]
    asked: list[str] = []

    class MoodySender(ResponseSender):
        def is_cancelled(self) -> bool:
            asked.append("moody")
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    class CalmSender(ResponseSender):
        def is_cancelled(self) -> bool:
            asked.append("calm")
            return False

    pump = ResponsePump(1, NoEngineRows())
    streams = [
        pump.open(sender, "r", [OutputRow(token_output(RowSettings(True), []))])
        for sender in (MoodySender(), CalmSender())
    ]
    abandoned: list = []
    poller = CancellationPoller(pump.live_streams, abandoned.append, period_s=1)
    for _ in range(2):
        poller.sweep()
        assert abandoned == []
    poller.sweep()
    assert abandoned == [streams[0]] and asked == ["moody", "calm"] * 3
    for stream in streams:
        pump.fail(stream, ErrorCode.CANCELLED, "over")
    pump.close()


@pytest.mark.parametrize(
    "sweep_s, pause",
    [
        (0.000, 0.050),  # nobody to ask: the period
        (0.0005, 0.0495),  # a few streams: a sweep begins every 50 ms
        (0.003, 0.147),  # 32 streams: a fiftieth of the time
        (0.020, 0.500),  # 256 streams are asked about twice a second all the same
    ],
)
def test_asking_takes_a_fiftieth_of_the_time_until_it_is_rare(sweep_s: float, pause: float) -> None:
    assert pause_s(sweep_s, period_s=0.050) == pytest.approx(pause)


def test_only_the_rows_that_still_run_are_cancelled() -> None:
    class Engine:
        cancelled: ClassVar[list[int]] = []

        def cancel_request(self, request_id: RequestId) -> None:
            self.cancelled.append(request_id)

    pump = ResponsePump(1, NoEngineRows())
    rows = [OutputRow(token_output(RowSettings(True), [])) for _ in range(4)]
    for number, row in enumerate(rows[:3], 7):
        row.request_id = RequestId(number)  # the last one has not been sent
    rows[1].ended = True
    stream = pump.open(ResponseSender(), "r", rows)
    EngineRows(Engine()).stop(stream)  # type: ignore[arg-type]
    assert Engine.cancelled == [7, 9]
    pump.fail(stream, ErrorCode.CANCELLED, "over")
    pump.close()
