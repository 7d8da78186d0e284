"""Planted bugs of the executor: live requests, what is resumed, mailboxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from backend.api.response import Response
from backend.core.messages import Hello
from backend.engine.sessions import SessionTable
from backend.executor import pause, replay
from backend.executor.executor import Executor
from backend.executor.mailbox import Mailboxes
from backend.executor.pause import Pauses
from backend.executor.replay import COUNTER, Replay

SetAttribute = Callable[[object, str, object], None]
NOTHING: Callable[..., None] = lambda *arguments, **others: None


def a_final_response_leaves_its_request_live(set_attribute: SetAttribute) -> None:
    original = Replay.take

    def take(self: Replay, response: Response, now_ns: int) -> Any:
        live = self._live.get(response.request_id & COUNTER)
        told = original(self, response, now_ns)
        if live is not None:
            self._live[response.request_id & COUNTER] = live
        return told

    set_attribute(Replay, "take", take)


def held_requests_are_not_sent_again(set_attribute: SetAttribute) -> None:
    set_attribute(Replay, "again", lambda self, *arguments: iter(()))


def lost_requests_are_refused_at_once(set_attribute: SetAttribute) -> None:
    def begin(self: Pauses, is_shut_down: Callable[[], bool]) -> None:
        with self._lock:
            ids = self._replay.ids()
        self._refuse(ids, pause.LOST)

    set_attribute(Pauses, "begin", begin)


def what_a_client_has_had_is_sent_again(set_attribute: SetAttribute) -> None:
    original = Replay._resume
    set_attribute(
        Replay,
        "_resume",
        lambda self, live, request: msgspec.structs.replace(original(self, live, request), delivered=[]),
    )


def a_resumed_request_has_the_id_of_the_engine_before(set_attribute: SetAttribute) -> None:
    set_attribute(Replay, "_there", lambda self, request_id: request_id)


def requests_are_forgotten_with_their_engine(set_attribute: SetAttribute) -> None:
    original = Replay.hold

    def hold(self: Replay, now_s: float) -> Any:
        for live in list(self._live.values()):
            self.pop(live.request_id)
        return original(self, now_s)

    set_attribute(Replay, "hold", hold)


def one_request_may_end_every_engine(set_attribute: SetAttribute) -> None:
    set_attribute(replay, "MAX_CRASHES", 1000)


def sessions_are_not_written(set_attribute: SetAttribute) -> None:
    set_attribute(SessionTable, "flush", NOTHING)


def a_lost_connection_still_counts_as_ready(set_attribute: SetAttribute) -> None:
    original = Executor._on_lost

    def on_lost(self: Executor) -> None:
        original(self)
        self.is_connected = True

    set_attribute(Executor, "_on_lost", on_lost)


def a_request_that_was_not_sent_is_kept(set_attribute: SetAttribute) -> None:
    def send(self: Executor, command: Any, on_response: Any, mailbox: bool = False) -> Any:
        with self._sending:
            registered = self._register(command, on_response, mailbox)
            self._transport.send(registered)
        return registered.request_id

    set_attribute(Executor, "_send", send)


def a_request_is_sent_before_it_is_known(set_attribute: SetAttribute) -> None:
    def send(self: Executor, command: Any, on_response: Any, mailbox: bool = False) -> Any:
        with self._sending:
            registered = self._register(command, on_response, mailbox)
            live = self._replay._live.pop(registered.request_id & COUNTER)
            self._transport.send(registered)
            self._replay._live[registered.request_id & COUNTER] = live
        return registered.request_id

    set_attribute(Executor, "_send", send)


def a_mailbox_is_opened_after_the_request_is_sent(set_attribute: SetAttribute) -> None:
    original = Executor._submit

    def submit(self: Executor, request: Any, on_response: Any, resume: Any, mailbox: bool) -> Any:
        request_id = original(self, request, on_response, resume, False)
        if mailbox:
            self._mailboxes.open(request_id)
        return request_id

    set_attribute(Executor, "_submit", submit)


def request_ids_lack_the_client(set_attribute: SetAttribute) -> None:
    original = Executor._on_message

    def on_message(self: Executor, message: Any) -> None:
        original(self, message)
        if isinstance(message, Hello):
            self._hello = msgspec.structs.replace(message, client_index=1)

    set_attribute(Executor, "_on_message", on_message)


def a_mailbox_wakes_nobody(set_attribute: SetAttribute) -> None:
    def put(self: Mailboxes, response: Response) -> None:
        with self._changed:
            self._boxes[response.request_id].append(response)

    set_attribute(Mailboxes, "put", put)


def a_mailbox_wakes_one_waiter(set_attribute: SetAttribute) -> None:
    def put(self: Mailboxes, response: Response) -> None:
        with self._changed:
            self._boxes[response.request_id].append(response)
            self._changed.notify()

    set_attribute(Mailboxes, "put", put)


def an_emptied_mailbox_stays(set_attribute: SetAttribute) -> None:
    def empty(self: Mailboxes, request_id: Any) -> list[Response]:
        responses, self._boxes[request_id] = self._boxes[request_id], []
        return responses

    set_attribute(Mailboxes, "_empty", empty)


def a_mailbox_is_read_without_its_lock(set_attribute: SetAttribute) -> None:
    def empty(self: Mailboxes, request_id: Any) -> list[Response]:
        responses = list(self._boxes[request_id])
        self._changed.release()
        self._changed.acquire()
        if responses and responses[-1].is_final:
            del self._boxes[request_id]
        else:
            self._boxes[request_id] = []
        return responses

    set_attribute(Mailboxes, "_empty", empty)


def a_cancellation_is_not_sent(set_attribute: SetAttribute) -> None:
    set_attribute(Executor, "cancel_request", NOTHING)
