"""Replies that take a while: work beside a watch for a client that leaves, for the time limit and for the shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import GatewayError, failed, overloaded, too_many_of_one, unavailable
from gateway.places import Places
from gateway.request_context import RequestContext, visit_of

LAST_WORD_TIMEOUT_S = 1.0
BLOCK = 1 << 16  # bytes of a response that are written at once


class StreamForm(NamedTuple):
    """The form of a stream: its type, and the piece of it that only says that the stream goes on; empty where there is none."""

    media_type: bytes
    waiting: bytes = b""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", self.media_type), (b"cache-control", b"no-store")]


EVENTS = StreamForm(b"text/event-stream; charset=utf-8", b": waiting for the server\n\n")
LINES = StreamForm(b"application/x-ndjson")
_JSON_HEADER = (b"content-type", b"application/json")


class Running:
    """The replies of one kind that are under way: how many at most, and how they are ended at a shutdown."""

    def __init__(self, places: Places, kind: str = "replies", state: str = "are being generated") -> None:
        """`kind` and `state`: the words for a client that is refused."""
        self._places, self._kind, self._state = places, kind, state
        self._workers: set[asyncio.Task[None]] = set()
        self.stopping = False

    @property
    def choices(self) -> int:
        return self._places.taken

    def enter(self, namespace: str, choices: int) -> None:
        """Take the places of so many replies. Raises GatewayError when there are not as many free."""
        if self.stopping:
            raise unavailable("the server is being stopped; try again later")
        if not self._places.take(namespace, choices):
            held, taken, total = self._places.held(namespace), self.choices, self._places.total
            if taken + choices > total:
                raise overloaded(f"{taken} {self._kind} {self._state}, the limit is {total}; try later")
            text = f"{held} {self._kind} with this key {self._state}, its share of {total}; try later"
            raise too_many_of_one(text)

    def leave(self, namespace: str, choices: int) -> None:
        self._places.give_back(namespace, choices)

    def start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        worker = asyncio.ensure_future(work)
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)
        return worker

    def stop(self) -> None:
        """End all replies: their clients get an error of status 503, as an event where the stream has begun."""
        self.stopping = True
        for worker in list(self._workers):
            worker.cancel()


class Outlet:
    """The way to the client. A write waits until the client has read enough of what was written before."""

    def __init__(self, send: Send, form: StreamForm = EVENTS) -> None:
        self._send, self._form = send, form
        self.started = False

    async def event(self, data: bytes) -> None:
        """Send complete events or lines. The first one begins the response."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._form.headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def waiting(self) -> None:
        """Tell the client of a stream that has begun that it goes on: a comment, which readers of events leave out."""
        if self.started and self._form.waiting:
            await self.event(self._form.waiting)

    async def end_of_events(self, data: bytes = b"") -> None:
        """Send the last events; there may be none."""
        if not self.started:
            await self.event(b"")
        await self._last([data])

    async def json(self, parts: list[bytes]) -> None:
        """Send the whole response: the parts of its JSON text."""
        headers = [_JSON_HEADER, (b"content-length", str(sum(map(len, parts))).encode())]
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._last(parts)

    async def _last(self, parts: list[bytes]) -> None:
        """Send all that is left of the body, block by block: others use the event loop in between."""
        left = sum(map(len, parts))
        for block in _blocks(parts):
            left -= len(block)
            await self._send({"type": "http.response.body", "body": block, "more_body": left > 0})
            if left:
                await asyncio.sleep(0)


def _blocks(parts: list[bytes]) -> Iterator[bytes]:
    """The bytes of `parts` in blocks of BLOCK at most; one empty block when there are none."""
    held = b""
    for part in parts:
        for start in range(0, len(part), BLOCK):
            block = part[start : start + BLOCK]
            if len(held) + len(block) > BLOCK:
                yield held
                held = b""
            held += block
    yield held


Work = Callable[[Outlet], Awaitable[None]]
ErrorEvent = Callable[[GatewayError], bytes]


def error_event(error: GatewayError) -> bytes:
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"


class Answer(Response):
    """Runs `work` as the response, within `choices` places and `timeout_s`.

    `work` ends at once when the client leaves. Its GatewayError becomes the response while nothing has been sent, and
    `on_error` of it the last event of a stream otherwise.
    """

    def __init__(
        self,
        work: Work,
        running: Running,
        choices: int,
        timeout_s: float,
        on_error: ErrorEvent = error_event,
        form: StreamForm = EVENTS,
    ) -> None:
        super().__init__()
        self._work, self._running, self._choices, self._timeout_s = work, running, choices, timeout_s
        self._on_error, self._form = on_error, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # The reply to HEAD has the headers of a stream; the model does no work.
            await Outlet(send, self._form).end_of_events()
            return
        outlet, context = Outlet(send, self._form), visit_of(scope)
        if context.is_background:  # the runner of batches has limits of its own
            await self._work(outlet)
            return
        self._running.enter(context.namespace, self._choices)
        context.at_end.callback(self._running.leave, context.namespace, self._choices)
        try:
            context.left = await self._run(outlet, receive)
        except GatewayError as error:
            if not outlet.started:
                raise
            await self._last_word(outlet, context, error)
        except Exception:
            if outlet.started:
                await self._last_word(outlet, context, failed(context.request_id))
            raise  # the front logs where it was

    async def _run(self, outlet: Outlet, receive: Receive) -> bool:
        """Work until it is done or not wanted any more. Returns whether the client left."""
        worker = self._running.start(self._work(outlet))
        watch = asyncio.ensure_future(_left(receive))
        try:
            done, _ = await asyncio.wait({worker, watch}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            worker.cancel()
            watch.cancel()
            await asyncio.gather(worker, watch, return_exceptions=True)
        if worker in done:  # the watch may have ended as well: a complete response ends it
            if worker.cancelled():
                raise unavailable("the server is being stopped; try again later")
            worker.result()
            return False
        if watch in done:
            return True
        raise GatewayError(408, f"the reply took more than {self._timeout_s:g} s; ask for fewer tokens", code="timeout")

    async def _last_word(self, outlet: Outlet, context: RequestContext, error: GatewayError) -> None:
        context.error = error
        try:
            async with asyncio.timeout(LAST_WORD_TIMEOUT_S):
                await outlet.end_of_events(self._on_error(error))
        except TimeoutError:
            return  # the client reads nothing any more; the connection is closed without a last word


async def _left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
