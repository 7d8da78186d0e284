"""A request to one of this server's own routes, without a connection: a line of a batch gets the answer that a client gets."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
from starlette.types import ASGIApp, Message

from gateway.errors import failed
from gateway.request_context import SCOPE_KEY, RequestContext

_HEADERS = [(b"content-type", b"application/json")]


async def ask(app: ASGIApp, path: str, context: RequestContext) -> tuple[int, bytes]:
    """POST the body of `context` to a route. Returns status and body."""
    status, parts, never = 0, bytearray(), asyncio.Event()

    async def receive() -> Message:
        await never.wait()  # no client leaves: to give the answer up, the task is cancelled
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.extend(message.get("body", b""))

    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": "POST"},
        **{"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": _HEADERS},
        **{"client": None, "server": None, SCOPE_KEY: context},
    }
    with context.at_end, suppress(Exception):  # a failure is answered with status 500
        await app(scope, receive, send)
    if not status:
        error = context.error = failed(context.request_id)
        return error.status, msgspec.json.encode(error.body())
    return status, bytes(parts)
