"""Middleware that every request passes first: walls against web pages, authentication, limits of size and number, and one
line in the log.

Neither a key nor any text of a prompt or a reply is ever logged: of a failure only its kind and its place are.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.browsers import PAGE, Wall, with_cors
from gateway.counters import Counters
from gateway.errors import GatewayError, failed, overloaded, too_many_of_one
from gateway.keys import Client, Keys
from gateway.places import Places
from gateway.request_context import SCOPE_KEY, RequestContext, visit_of
from gateway.request_log import RouteNames, log_request
from gateway.settings import Settings
from gateway.tracing import caller_of
from gateway.without_effect import IGNORED

OPEN_TO_ALL = ("/", "/health", "/ping", "/openapi.json")  # they need no key, and have no body that would be read
STREAMED = ("/v1/files",)  # their routes read the body as it comes, within bounds of their own
MESSAGES = "/v1/messages"  # where Anthropic's API begins; its client sends ANTHROPIC_VERSION everywhere
OLLAMA = "/api/"  # where Ollama's begins
ANTHROPIC_VERSION = "anthropic-version"
MAX_HEADER = 2000  # bytes of a header with words of the client
OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-real-ip")  # headers by which a proxy is known
NO_KEY = "there is no API key; send the header Authorization: Bearer KEY, or x-api-key: KEY"
WRONG_KEY = "the API key is none of this server's; send one of its file of API keys"
_log = logging.getLogger("everbatch.gateway")


class Middleware:
    """The ASGI application in front of the routes."""

    def __init__(
        self,
        app: ASGIApp,
        names: RouteNames,
        settings: Settings,
        keys: Keys | None,
        counters: Counters,
        places: Places,
        body_limit: Callable[[int], Awaitable[int]],
    ) -> None:
        """`body_limit`: the most bytes of a body that has so many, asked for each that is not small."""
        self._app, self._names, self._settings, self._keys = app, names, settings, keys
        self._counters, self._places = counters, places
        self._body_limit = body_limit
        self._wall = Wall(settings)
        self._behind_wall = with_cors(self._answer, settings.allow_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext()
        scope[SCOPE_KEY] = context
        context.at_end.callback(self._note, scope, context, time.perf_counter())
        with context.at_end:
            await self._check(scope, receive, _noting(send, context))

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what pages of other servers may not send, and pass on the rest."""
        context, headers = visit_of(scope), Headers(scope=scope)
        context.is_ollama = scope["path"].startswith(OLLAMA)
        context.is_anthropic = scope["path"].startswith(MESSAGES) or ANTHROPIC_VERSION in headers
        try:
            self._wall.check(scope)
        except GatewayError as error:
            await _refuse(send, context, error)
        else:
            await self._behind_wall(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = visit_of(scope)
        try:
            headers = Headers(scope=scope)
            is_open = scope["path"] in OPEN_TO_ALL or scope["path"].startswith(PAGE)
            context.caller = caller_of(headers)
            context.is_forwarded = any(name in headers for name in OF_PROXIES)
            if self._keys is not None and not is_open:
                context.client = _client(headers, self._keys)
            if scope["method"] == "POST" and not is_open:
                self._admit(context)
                if scope["path"] not in STREAMED:
                    context.body = await self._body(headers, receive)
                    receive = _after_body(receive)
            await self._app(scope, receive, send)
        except GatewayError as error:
            await _refuse(send, context, error)
        except ConnectionResetError:
            context.left = True
        except Exception as error:
            _log_failure(error, context)
            if not context.status:
                await _refuse(send, context, failed(context.request_id))

    def _admit(self, context: RequestContext) -> None:
        """Count a request that may take long; the others are always answered. Raises GatewayError(429)."""
        if not self._places.take(context.namespace):
            held, total = self._places.held(context.namespace), self._places.total
            if self._places.taken >= total:
                raise overloaded(f"{total} requests are being answered, the limit; try again later")
            text = f"{held} requests with this key are being answered, its share of {total}; try again later"
            raise too_many_of_one(text)
        context.at_end.callback(self._places.give_back, context.namespace)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body. Raises GatewayError 408 or 413; ConnectionResetError when the client leaves."""
        length = headers.get("content-length", "0")
        if length.isdecimal():
            await self._check_size(int(length[:18]))
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await self._received(receive)
        except TimeoutError:
            seconds = self._settings.body_timeout_s
            raise GatewayError(408, f"the body did not arrive within {seconds:g} s", code="timeout") from None

    async def _received(self, receive: Receive) -> bytes:
        data = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            data += message.get("body", b"")
            await self._check_size(len(data))
            if not message.get("more_body", False):
                return bytes(data)

    async def _check_size(self, size: int) -> None:
        """Raise GatewayError(413) for a body that is too large."""
        if size > self._settings.max_body_bytes and size > (limit := await self._body_limit(size)):
            raise GatewayError(
                413, f"the body has more than {limit} bytes, the limit; send less", code="body_too_large"
            )

    def _note(self, scope: Scope, context: RequestContext, began: float) -> None:
        route = self._names.of(scope)
        counters = self._counters
        counters.requests[route or "other", context.status] += 1
        counters.disconnects += context.left
        counters.prompt_tokens += context.prompt_tokens
        counters.completion_tokens += context.completion_tokens
        log_request(scope, route or self._names.masked(scope["path"]), context, time.perf_counter() - began)


def _client(headers: Headers, keys: Keys) -> Client:
    """The client whose key the request carries, in either of two headers. Raises GatewayError(401)."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()]
    client = next((found for key in given if key and (found := keys.client_of(key)) is not None), None)
    if client is None:
        text = WRONG_KEY if any(given) else NO_KEY
        raise GatewayError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    return client


def _noting(send: Send, context: RequestContext) -> Send:
    """Ahead of the last part of an answer its places are given back, and it is counted: that is what its client finds next.

    A client that reads nothing keeps its places, for the last part is not sent until it has read what came before.
    """

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            context.status = message["status"]
            names = (b"x-request-id", b"request-id") if context.is_anthropic else (b"x-request-id",)
            own = [(name, context.request_id.encode()) for name in names]
            if context.ignored:
                own.append((IGNORED.encode(), ", ".join(key.path for key in context.ignored).encode()))
            if context.guide_notes:
                own.append((b"x-everbatch-not-held", _header_value(context.guide_notes)))
            message["headers"] = [*message.get("headers", []), *own]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits for the client to read
            context.at_end.close()
        await send(message)

    return noting


def _header_value(notes: list[str]) -> bytes:
    """Notes in the characters that a header may have, and not too many."""
    text = ", ".join(dict.fromkeys(notes))
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text.encode("ascii", "backslashreplace")[:MAX_HEADER]


def _after_body(receive: Receive) -> Receive:
    """The body is taken: what the application may still hear is that the client has left."""
    told = False

    async def after_body() -> Message:
        nonlocal told
        if not told:
            told = True
            return {"type": "http.request", "body": b"", "more_body": False}
        return await receive()

    return after_body


async def _refuse(send: Send, context: RequestContext, error: GatewayError) -> None:
    context.error = error
    status, body = context.refusal(error)
    data = msgspec.json.encode(body)
    headers = {"content-type": "application/json", "content-length": str(len(data)), **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": data})


def _log_failure(error: Exception, context: RequestContext) -> None:
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    places = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
    _log.error("%s: %s in %s", context.request_id, type(error).__name__, places)
