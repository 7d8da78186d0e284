"""A client's connection: uvicorn's, with bounds for those who send slowly, in tiny chunks, ambiguously, or more than is read.

None of them needs a key to come as far as this, so each costs little and ends soon.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.errors import GatewayError

HEAD_TIMEOUT_S = 10.0  # for the head of a request to arrive, from the connection's beginning or the head's
LINGER_S = 2.0  # for the client to read an answer that came before the end of its body
MOST_CHUNKS = 4096  # in one body
OTHER_FILES = 128  # open files that are kept for other things than connections
_UNREADABLE = "the request cannot be read; the connection is closed"


class Refused(h11.RemoteProtocolError):
    """A request that is valid for h11 and refused here. The text is for the client."""


class BoundedHttp(h11.Connection):
    """h11's side of the server."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._chunks = 0

    def next_event(self) -> Any:
        """Raises h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            _check_framing(event)
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_end
            if self._chunks > MOST_CHUNKS:
                raise Refused(f"the body has more than {MOST_CHUNKS} chunks, the limit; send larger ones")
        return event


def _check_framing(request: h11.Request) -> None:
    """Raise Refused for a body whose end a proxy may see in another place than this server."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise Refused("Content-Length beside Transfer-Encoding: where the body ends is ambiguous; send one of them")
    if request.http_version != b"1.1":
        raise Refused("Transfer-Encoding is not part of HTTP/1.0; send Content-Length")


class Connection(H11Protocol):
    """Ends when the head of a request does not come in time, when a request is refused before its body was read, or when it is
    idle and its place is needed.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = BoundedHttp(self.conn._max_incomplete_event_size)
        self._head_timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._idle_since = time.monotonic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()
        if len(self.connections) > (most := most_connections()):
            self._make_room(most)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ended:  # The client has its answer; further bytes are dropped.
            return
        super().data_received(data)
        if self._is_idle():
            self._watch_head()
        else:
            self._stop_watching()

    def on_response_complete(self) -> None:
        self._idle_since = time.monotonic()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self.server_state.total_requests += 1
            self._end()
        else:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it while it handles the h11.RemoteProtocolError."""
        if self._is_idle() or not self.cycle.response_started:
            self._answer_400(_fault())
        self._end()

    def shutdown(self) -> None:
        if self._ended:
            self.transport.close()
        else:
            super().shutdown()

    def _is_idle(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch_head(self) -> None:
        """Give the client HEAD_TIMEOUT_S from now on, unless it has been given them already."""
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _make_room(self, most: int) -> None:
        """Where more than `most` are open, close the one that has been idle for longest, which may be this one."""
        connections = [other for other in self.connections if isinstance(other, Connection)]
        open_ones = [other for other in connections if not other.transport.is_closing()]
        if len(open_ones) > most:
            idle = [other for other in open_ones if other._is_idle()]
            min(idle, key=lambda other: other._idle_since).transport.abort()

    def _answer_400(self, text: str) -> None:
        data = msgspec.json.encode(GatewayError(400, text, code="invalid_http").body())
        headers = [("content-type", "application/json"), ("content-length", str(len(data))), ("connection", "close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=data),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _end(self) -> None:
        """Send no more, and close when the client has done so or LINGER_S are over: a connection that is closed while data
        arrives is reset, and the client would lose its answer.
        """
        self._ended = True
        self._stop_watching()
        if self.cycle is not None:  # An application that waits for the rest of the body hears that none will come.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _fault() -> str:
    """The text for the client about the exception that is being handled."""
    error = sys.exception()
    return str(error) if isinstance(error, Refused) else _UNREADABLE


def most_connections() -> int:
    """How many connections there may be at once: one more would need a file that the process may not open."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES)
