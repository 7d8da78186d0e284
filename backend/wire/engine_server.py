"""EngineServer: lets several clients talk to one EngineLoop over a private socket.

Each connection has a reader thread, which decodes commands into the loop's inbox, and a bounded backlog with its own writer
thread, so that the engine's thread never waits for a socket. A client that does not read its responses is disconnected; the
requests of a disconnected client are cancelled. A command that cannot be decoded, or a response that is too large, fails alone; a
connection ends only if its frames can no longer be separated. A thread sends heartbeats to all clients (Heart).
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

import msgspec

from backend.api.errors import ErrorCode, InvalidRequest
from backend.api.request import RequestId
from backend.api.response import Response
from backend.api.stats import EngineStats, Records
from backend.core.messages import (
    CLIENT_SHIFT,
    Adapters,
    Cancel,
    ClientGone,
    Command,
    Heartbeat,
    Hello,
    Message,
    Recorded,
    Responses,
    Stats,
    Trial,
)
from backend.wire.address import FileAddress, ListeningAddress
from backend.wire.framing import (
    MAX_FRAME_BYTES,
    FrameTooLarge,
    Undecodable,
    decode_command,
    encode_frame,
    receive_frame,
    request_id_of,
)
from backend.wire.heartbeat import HeartbeatSender
from backend.wire.outgoing import Outgoing, ReaderTooSlow, hang_up

log = logging.getLogger("everbatch.engine")
MAX_GREETINGS = 64  # connections that may be about to prove who they are
UNREADABLE = (
    "a value of the request is of the wrong type or out of its range; token ids and counts are integers of 64 bits"
)


class ClientConnection:
    """One client. Its first message must be a Hello; afterwards any thread may send."""

    def __init__(
        self,
        index: int,
        sock: socket.socket,
        post: Callable[[Command | ClientGone], None],
        on_closed: Callable[[int], None],
    ) -> None:
        self.index = index
        self._sock = sock
        self._post = post
        self._on_closed = on_closed
        self._outgoing = Outgoing(sock, f"engine-writer-{index}")

    def start(self) -> None:
        self._outgoing.start()
        threading.Thread(target=self._read, name=f"engine-reader-{self.index}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Never blocks; a client that does not read is disconnected. Raises InvalidRequest for a message that makes no frame.

        While much waits for the client already, debug tensors are dropped instead of disconnecting it.
        """
        waiting = self._outgoing.num_waiting_bytes
        if waiting > MAX_FRAME_BYTES and isinstance(message, Recorded) and message.records.debug_tensors:
            log.warning(
                "client %d: debug tensors of a step were dropped, for %d bytes wait for it and the limit is %d",
                self.index,
                waiting,
                MAX_FRAME_BYTES,
            )
            return
        frame = encode_frame(message)
        try:
            self._outgoing.send(frame, droppable=isinstance(message, Heartbeat))
        except ReaderTooSlow:
            log.error("client %d does not read its responses; it is cut off", self.index)
            hang_up(self._sock)
        except OSError:
            pass  # the reader notices the end and cleans up

    def deliver(self, responses: list[Response]) -> None:
        """Send responses in one message, or in several if it is too large. One response that is too large becomes an error."""
        try:
            self.send(Responses(responses))
        except InvalidRequest as error:
            if len(responses) == 1:
                self._fail(responses[0].request_id, _refusal(error))
                return
            half = len(responses) // 2
            self.deliver(responses[:half])
            self.deliver(responses[half:])

    def finish(self) -> None:
        """End the connection after the queued frames."""
        self._outgoing.finish()

    def _read(self) -> None:
        try:
            while self._read_one():
                pass
        except OSError as error:
            log.warning("client %d: %s", self.index, type(error).__name__)
        finally:
            self._on_closed(self.index)
            self._post(ClientGone(self.index))
            self._outgoing.finish()

    def _read_one(self) -> bool:
        """Read one command and post or refuse it. Returns False at the end of the stream."""
        try:
            frame = receive_frame(self._sock)
        except FrameTooLarge as error:
            log.warning("client %d: a frame of %d bytes was dropped", self.index, error.num_bytes)
            return True
        if frame is None:
            return False
        try:
            command = decode_command(frame)
        except Undecodable as error:
            log.warning("client %d: a command of %d bytes cannot be read: %s", self.index, len(frame), error)
            request_id = request_id_of(frame)
            if request_id is not None and request_id >> CLIENT_SHIFT == self.index:
                self._fail(request_id, UNREADABLE)
        else:
            self._accept(command)
        return True

    def _fail(self, request_id: RequestId, message: str) -> None:
        """Answer a request with an error, and cancel it in the engine."""
        error = Response(request_id, error_or_none=message, error_code=ErrorCode.INVALID_ARGUMENT)
        self._post(Cancel(request_id))
        self.send(Responses([error]))

    def _accept(self, command: Command) -> None:
        if command.request_id >> CLIENT_SHIFT != self.index:
            log.warning("client %d uses a request id that is not its own; the command is dropped", self.index)
            return
        self._post(command)


class EngineServer:
    def __init__(
        self,
        address: str | ListeningAddress,
        post: Callable[[Command | ClientGone], None],
        hello: Callable[[int], Hello],
        present_iteration: Callable[[], int | None] = lambda: None,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """Listen at `address`; a text is the path of a socket. `present_iteration`, `is_alive`: see Heart. Raises OSError."""
        self._post = post
        self._hello = hello
        self._connections: dict[int, ClientConnection] = {}
        self._next_index = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closed = False
        self._greetings = threading.BoundedSemaphore(MAX_GREETINGS)
        self._address = FileAddress(address) if isinstance(address, str) else address
        self._listener = self._address.listen()
        self._heart = HeartbeatSender(present_iteration, self._broadcast, is_alive)
        threading.Thread(target=self._accept, name="engine-accept", daemon=True).start()
        self._heart.start()

    @property
    def port(self) -> int:
        """TCP port on which this server listens; only for a NetworkAddress."""
        return int(self._listener.getsockname()[1])

    def deliver(self, responses: list[Response]) -> None:
        """Send the responses of one step: one message for each client."""
        by_client: dict[int, list[Response]] = defaultdict(list)
        for response in responses:
            by_client[response.request_id >> CLIENT_SHIFT].append(response)
        for index, batch in by_client.items():
            connection = self._connections.get(index)
            if connection is not None:
                connection.deliver(batch)

    def publish_stats(self, stats: EngineStats) -> None:
        self._broadcast(Stats(stats))

    def publish_adapters(self, adapters: Mapping[str, str]) -> None:
        self._broadcast(Adapters(adapters))

    def publish_trial(self, request_id: RequestId | None) -> None:
        self._broadcast(Trial(request_id))

    def publish_records(self, records: Records) -> None:
        """Send records to all clients. Records that are too large for a frame are dropped, for responses wait behind them.

        The debug tensors of each step are sent apart, so that they do not make other records too large.
        """
        others = msgspec.structs.replace(records, debug_tensors=[])
        for part in (others, *(Records(debug_tensors=[each]) for each in records.debug_tensors)):
            if part == Records():
                continue
            try:
                self._broadcast(Recorded(part))
            except FrameTooLarge as error:
                log.warning("records of %d bytes were dropped, the limit is %d", error.num_bytes, error.limit)

    def close(self) -> None:
        """Stop listening. Connections end once their queued frames have been sent."""
        self._heart.stop()
        hang_up(self._listener)
        self._listener.close()
        with self._lock:
            self._is_closed = True
            connections = list(self._connections.values())
        for connection in connections:
            connection.finish()

    def _broadcast(self, message: Message) -> None:
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.send(message)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._greetings.acquire(blocking=False):
                log.warning("a connection was refused, because %d others have not yet said who they are", MAX_GREETINGS)
                sock.close()
                continue
            # In a thread, because a stranger from the network may take its time.
            threading.Thread(target=self._admit, args=(sock,), name="engine-greeting", daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        """Greet a connection that may be a client, and close another one."""
        try:
            is_client = self._address.admits(sock)
        finally:
            self._greetings.release()
        if is_client:
            self._greet(sock)
        else:
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        """Register a connection and send its Hello. From then on it is notified of the server's end."""
        index = next(self._next_index)
        with self._lock:
            if self._is_closed:
                sock.close()
                return
            hello = self._hello(index)  # made under the lock, so that it misses no change that is broadcast
            connection = self._connections[index] = ClientConnection(index, sock, self._post, self._forget)
            connection.send(hello)
        connection.start()

    def _forget(self, index: int) -> None:
        with self._lock:
            self._connections.pop(index, None)


def _refusal(error: InvalidRequest) -> str:
    """The error message for a response that cannot be sent."""
    if not isinstance(error, FrameTooLarge):
        return "the response holds a value that cannot be sent; ask for no log-probs"
    return (
        f"the response has {error.num_bytes} bytes, the limit is {error.limit}; let it stream, or ask for fewer tokens "
        f"or top_log_probs"
    )
