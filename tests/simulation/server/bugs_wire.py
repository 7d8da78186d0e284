"""Planted bugs of the wire: connections, frames, the heart; and of the engine's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend.api.response import Response
from backend.core.messages import CLIENT_SHIFT, ClientGone
from backend.engine.loop import EngineLoop
from backend.wire import client, engine_server, framing, outgoing
from backend.wire.client import SocketTransport
from backend.wire.engine_server import ClientConnection, EngineServer
from backend.wire.heartbeat import HeartbeatSender
from backend.wire.outgoing import Outgoing

SetAttribute = Callable[[object, str, object], None]
NOTHING: Callable[..., None] = lambda *arguments, **others: None


def what_was_sent_in_part_is_sent_again(set_attribute: SetAttribute) -> None:
    def send(self: Outgoing, frame: bytes, droppable: bool = False) -> None:
        with self._lock:
            if droppable and self._backlog:
                return
            sent = 0 if self._backlog else self._try_to_send(frame)
            if sent == len(frame) or (droppable and not sent):
                return
            self._backlog.append(memoryview(frame))
            self._num_bytes += len(frame)
        self._to_do.release()

    set_attribute(Outgoing, "send", send)


def a_frame_overtakes_those_that_wait(set_attribute: SetAttribute) -> None:
    def send(self: Outgoing, frame: bytes, droppable: bool = False) -> None:
        with self._lock:
            sent = self._try_to_send(frame)
            if sent == len(frame) or (droppable and not sent):
                return
            self._backlog.append(memoryview(frame)[sent:])
            self._num_bytes += len(frame) - sent
        self._to_do.release()

    set_attribute(Outgoing, "send", send)


def a_heartbeat_is_dropped_in_its_middle(set_attribute: SetAttribute) -> None:
    original = Outgoing.send

    def send(self: Outgoing, frame: bytes, droppable: bool = False) -> None:
        if not droppable:
            original(self, frame)
            return
        with self._lock:
            if not self._backlog:
                self._try_to_send(frame)

    set_attribute(Outgoing, "send", send)


def a_frame_leaves_the_backlog_before_it_is_sent(set_attribute: SetAttribute) -> None:
    def write(self: Outgoing) -> None:
        try:
            while self._to_do.acquire() and self._backlog:
                with self._lock:
                    frame = self._backlog.popleft()
                    self._num_bytes -= len(frame)
                self._sock.sendall(frame)
        except OSError:
            pass
        finally:
            outgoing.hang_up(self._sock)
            self._sock.close()

    set_attribute(Outgoing, "_write", write)


def frames_are_sent_without_the_lock(set_attribute: SetAttribute) -> None:
    def send(self: Outgoing, frame: bytes, droppable: bool = False) -> None:
        if droppable and self._backlog:
            return
        sent = 0 if self._backlog else self._try_to_send(frame)
        if sent == len(frame) or (droppable and not sent):
            return
        self._backlog.append(memoryview(frame)[sent:])
        self._num_bytes += len(frame) - sent
        self._to_do.release()

    set_attribute(Outgoing, "send", send)


def a_finished_connection_stays_open(set_attribute: SetAttribute) -> None:
    set_attribute(Outgoing, "finish", NOTHING)


def a_socket_is_closed_without_hanging_up(set_attribute: SetAttribute) -> None:
    for module in (outgoing, engine_server, client):
        set_attribute(module, "hang_up", NOTHING)


def a_connection_that_has_ended_stays_registered(set_attribute: SetAttribute) -> None:
    set_attribute(EngineServer, "_forget", NOTHING)


def a_new_connection_is_not_read(set_attribute: SetAttribute) -> None:
    set_attribute(ClientConnection, "start", lambda self: self._outgoing.start())


def requests_of_a_client_that_is_gone_go_on(set_attribute: SetAttribute) -> None:
    original = EngineLoop._apply

    def apply(self: EngineLoop, command: Any, posted_ns: int) -> None:
        if not isinstance(command, ClientGone):
            original(self, command, posted_ns)

    set_attribute(EngineLoop, "_apply", apply)


def all_requests_end_when_a_client_is_gone(set_attribute: SetAttribute) -> None:
    original = EngineLoop._apply

    def apply(self: EngineLoop, command: Any, posted_ns: int) -> None:
        if isinstance(command, ClientGone):
            for request_id in self._core.live_ids():
                self._core.cancel(request_id)
        else:
            original(self, command, posted_ns)

    set_attribute(EngineLoop, "_apply", apply)


def responses_go_to_another_client(set_attribute: SetAttribute) -> None:
    def deliver(self: EngineServer, responses: list[Response]) -> None:
        for connection in list(self._connections.values())[:1]:
            connection.deliver(responses)

    set_attribute(EngineServer, "deliver", deliver)


def only_the_first_client_of_a_step_gets_its_responses(set_attribute: SetAttribute) -> None:
    original = EngineServer.deliver

    def deliver(self: EngineServer, responses: list[Response]) -> None:
        first = responses[0].request_id >> CLIENT_SHIFT if responses else 0
        original(self, [each for each in responses if each.request_id >> CLIENT_SHIFT == first])

    set_attribute(EngineServer, "deliver", deliver)


def a_lost_connection_is_not_told(set_attribute: SetAttribute) -> None:
    original = SocketTransport._disconnect

    def disconnect(self: SocketTransport) -> None:
        self._on_lost = NOTHING
        original(self)

    set_attribute(SocketTransport, "_disconnect", disconnect)


def a_lost_connection_keeps_its_writer(set_attribute: SetAttribute) -> None:
    def disconnect(self: SocketTransport) -> None:
        self._outgoing = None
        with self._lock:
            sock, self._sock = self._sock, None
        client.hang_up(sock)
        self._on_lost()

    set_attribute(SocketTransport, "_disconnect", disconnect)


def a_lost_connection_is_not_made_again(set_attribute: SetAttribute) -> None:
    original = SocketTransport._disconnect

    def disconnect(self: SocketTransport) -> None:
        original(self)
        self._closed.set()

    set_attribute(SocketTransport, "_disconnect", disconnect)


def a_failed_connect_ends_the_transport(set_attribute: SetAttribute) -> None:
    original = SocketTransport._connect

    def connect(self: SocketTransport) -> Any:
        sock = original(self)
        if sock is None and self.engine_pid is not None:
            self._closed.set()
        return sock

    set_attribute(SocketTransport, "_connect", connect)


def a_frame_is_expected_in_one_piece(set_attribute: SetAttribute) -> None:
    def receive_exactly(connection: Any, length: int) -> bytes | None:
        return connection.recv(length) or None

    set_attribute(framing, "_receive_exactly", receive_exactly)


def a_command_that_cannot_be_read_ends_the_reader(set_attribute: SetAttribute) -> None:
    def decode(frame: bytes) -> Any:
        return framing._decode_command(frame)

    set_attribute(engine_server, "decode_command", decode)


def the_heart_says_that_each_step_is_new(set_attribute: SetAttribute) -> None:
    original = HeartbeatSender.beat

    def beat(self: HeartbeatSender) -> None:
        self._turn = None
        original(self)

    set_attribute(HeartbeatSender, "beat", beat)


def the_heart_stops_during_a_step(set_attribute: SetAttribute) -> None:
    original = HeartbeatSender.beat

    def beat(self: HeartbeatSender) -> None:
        if self._present_iteration() is None:
            original(self)

    set_attribute(HeartbeatSender, "beat", beat)


def the_loop_forgets_what_came_while_it_ended(set_attribute: SetAttribute) -> None:
    original = EngineLoop._poll

    def poll(self: EngineLoop) -> None:
        original(self)
        if not self._inbox.empty():
            self._inbox.get()

    set_attribute(EngineLoop, "_poll", poll)


def responses_without_a_step_are_not_delivered(set_attribute: SetAttribute) -> None:
    from backend.engine.core import EngineCore

    take = EngineCore.take_responses

    def step_only(self: EngineCore) -> list[Response]:
        return [each for each in take(self) if not each.has_error()]

    set_attribute(EngineCore, "take_responses", step_only)
