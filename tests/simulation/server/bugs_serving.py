"""Planted bugs of a stub: pump, poller, server, text."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from backend.api.response import Response
from backend.serving.delivery.cancellation import CancellationPoller
from backend.serving.delivery.pump import ResponsePump
from backend.serving.intake.intake import RequestIntake
from backend.serving.intake.load import EngineLoad
from backend.serving.intake.text_pool import TextPool
from backend.serving.stream import Failure, OutputRow, Stream
from backend.text.stop_strings import StopMatcher
from backend.text.stream import TextStream
from tests.mutants.changes import change
from tests.simulation.server.threads import time as simulated_time

SetAttribute = Callable[[object, str, object], None]
NOTHING: Callable[..., None] = lambda *arguments, **others: None


def a_stream_that_was_served_still_counts_as_queued(set_attribute: SetAttribute) -> None:
    def run(self: ResponsePump, lane: Any) -> None:
        while (stream := lane.get()) is not None:
            with stream.lock:
                arrived, stream.inbox = stream.inbox, deque()
            self._serve(stream, arrived)
            stream.queued = False
            if stream.closed:
                self._note_late_ends(stream, arrived)

    set_attribute(ResponsePump, "_run", run)


def the_inbox_is_taken_without_the_lock(set_attribute: SetAttribute) -> None:
    def run(self: ResponsePump, lane: Any) -> None:
        while (stream := lane.get()) is not None:
            stream.queued = False
            arrived = list(stream.inbox)
            self._lanes[0].qsize()
            simulated_time.sleep(0.0)
            with stream.lock:
                stream.inbox = deque()
            try:
                self._serve(stream, arrived)
            except Exception:
                self._end_badly(stream, Failure("INTERNAL", "it"))  # type: ignore[arg-type]
            if stream.closed:
                self._note_late_ends(stream, arrived)

    set_attribute(ResponsePump, "_run", run)


def each_response_goes_to_another_lane(set_attribute: SetAttribute) -> None:
    turns = itertools.count()
    original = ResponsePump.deliver

    def deliver(self: ResponsePump, stream: Stream, row: Any, response: Response) -> None:
        stream.lane = self._lanes[next(turns) % len(self._lanes)]
        original(self, stream, row, response)

    set_attribute(ResponsePump, "deliver", deliver)


def a_stream_closes_after_its_last_response(set_attribute: SetAttribute) -> None:
    original = ResponsePump._send

    def send(self: ResponsePump, stream: Stream, response: Any, last: bool) -> bool:
        if not last:
            return original(self, stream, response, last)
        stream.sender.send(response, flags=1)
        self._close(stream)
        return True

    set_attribute(ResponsePump, "_send", send)


def a_stream_closes_without_its_gate(set_attribute: SetAttribute) -> None:
    def close(self: ResponsePump, stream: Stream) -> None:
        with stream.lock:
            stream.closed = True
        with self._live_lock:
            self._live.pop(id(stream), None)

    set_attribute(ResponsePump, "_close", close)


def the_poller_asks_without_the_gate(set_attribute: SetAttribute) -> None:
    set_attribute(
        CancellationPoller, "_is_cancelled", lambda self, stream: not stream.closed and stream.sender.is_cancelled()
    )


def the_poller_asks_streams_that_are_closed(set_attribute: SetAttribute) -> None:
    def is_cancelled(self: CancellationPoller, stream: Stream) -> bool:
        with stream.gate:
            return bool(stream.sender.is_cancelled())

    set_attribute(CancellationPoller, "_is_cancelled", is_cancelled)


def the_poller_looks_once(set_attribute: SetAttribute) -> None:
    original = CancellationPoller.sweep

    def sweep(self: CancellationPoller) -> None:
        original(self)
        self._live_streams = lambda: []

    set_attribute(CancellationPoller, "sweep", sweep)


def a_refusal_ends_a_stream_that_its_sender_has(set_attribute: SetAttribute) -> None:
    def refuse(self: ResponsePump, stream: Stream, code: Any, message: str) -> None:
        self._end_badly(stream, Failure(code, message))

    set_attribute(ResponsePump, "refuse", refuse)


def a_failed_row_does_not_end(set_attribute: SetAttribute) -> None:
    original = ResponsePump._end_row

    def end_row(self: ResponsePump, stream: Stream, row: Any, response: Response) -> None:
        original(self, stream, row, response)
        row.ended = not response.has_error()

    set_attribute(ResponsePump, "_end_row", end_row)


def of_joined_responses_the_last_one_counts(set_attribute: SetAttribute) -> None:
    original = ResponsePump._feed
    set_attribute(ResponsePump, "_feed", lambda self, stream, arrived: original(self, stream, list(arrived)[-1:]))


def a_failed_send_leaves_its_stream_open(set_attribute: SetAttribute) -> None:
    def send(self: ResponsePump, stream: Stream, response: Any, last: bool) -> bool:
        try:
            if last:
                self._close(stream)
            stream.sender.send(response, flags=int(last))
        except Exception:
            return False
        return True

    set_attribute(ResponsePump, "_send", send)


def a_failed_end_is_not_tried_again(set_attribute: SetAttribute) -> None:
    def end_with(self: ResponsePump, stream: Stream, failure: Failure) -> None:
        self._close(stream)
        self.stop_rows(stream)
        try:
            stream.sender.send(self._error(failure), flags=1)
        except Exception:
            return

    set_attribute(ResponsePump, "_end_with", end_with)


def a_request_that_was_refused_stays_counted(set_attribute: SetAttribute) -> None:
    original = EngineLoad.leave
    turns = itertools.count()

    def leave(self: EngineLoad) -> None:
        if next(turns) % 5:
            original(self)

    set_attribute(EngineLoad, "leave", leave)


def a_counter_is_changed_without_its_lock(set_attribute: SetAttribute) -> None:
    def leave(self: EngineLoad) -> None:
        count = self._num_requests
        simulated_time.sleep(0.0)
        self._num_requests = count - 1

    set_attribute(EngineLoad, "leave", leave)


def what_was_cancelled_while_it_was_handed_over_goes_on(set_attribute: SetAttribute) -> None:
    def submit(self: RequestIntake, stream: Stream, works: Any) -> None:
        rows = [OutputRow.of(work) for work in works]
        if self._answers.begin(stream, rows):
            for work, row in zip(works, rows):
                self._submit_row(stream, row, work)

    set_attribute(RequestIntake, "_submit", submit)


def a_stop_ends_the_request_of_another_client(set_attribute: SetAttribute) -> None:
    original = ResponsePump.answer_stop

    def answer_stop(self: ResponsePump, stream: Stream) -> None:
        for candidate in self.live_streams()[:1]:
            if candidate is not stream and not candidate.answers_nothing:
                self.cancel(candidate)
        original(self, stream)

    set_attribute(ResponsePump, "answer_stop", answer_stop)


def a_text_stays_in_its_queue(set_attribute: SetAttribute) -> None:
    change(TextPool, "_begin", ("self._leave_queue(job)", "pass"))(set_attribute)


def a_text_that_was_read_still_counts_as_read(set_attribute: SetAttribute) -> None:
    set_attribute(TextPool, "_end", lambda self, job: True)


def a_text_that_takes_too_long_keeps_its_place(set_attribute: SetAttribute) -> None:
    original = TextPool._give_up

    def give_up(self: TextPool, job: Any) -> None:
        reading = self._reading[job]
        original(self, job)
        self._given_up.remove(reading.thread)
        self._threads.append(reading.thread)

    set_attribute(TextPool, "_give_up", give_up)


def texts_do_not_count_their_bytes_down(set_attribute: SetAttribute) -> None:
    def leave_queue(self: TextPool, job: Any) -> None:
        del self._queued[job]

    set_attribute(TextPool, "_leave_queue", leave_queue)


def the_end_of_a_text_is_forgotten(set_attribute: SetAttribute) -> None:
    original = TextStream.flush
    set_attribute(TextStream, "flush", lambda self: original(self).__class__(""))


def a_stop_string_over_two_tokens_is_not_seen(set_attribute: SetAttribute) -> None:
    original = StopMatcher.push

    def push(self: StopMatcher, text: str) -> Any:
        found = original(self, text)
        fresh = StopMatcher(self._stops, True) if hasattr(self, "_stops") else None
        if fresh is not None:
            self.__dict__.update(fresh.__dict__)
        return found

    set_attribute(StopMatcher, "push", push)
