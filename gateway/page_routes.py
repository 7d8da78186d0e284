"""The page at `/`: its files, and the stream of views that its live panel shows (docs/page.md).

The files hold nothing of a client and are open to all; the page asks for a key where the routes of the API do.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request, Response

from gateway.answers import Answer, Outlet
from gateway.core import MARGIN_S, Gateway
from gateway.errors import GatewayError
from gateway.keys import READ_METRICS
from gateway.live import USUAL_HZ, away_event, rate_of
from gateway.request_context import visit_of

DIRECTORY = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}  # all are UTF-8
HEADERS = {
    # Whatever a model writes, the browser loads, runs and sends nothing but what comes from this server.
    # Pictures that a user attaches are data: URLs, which lead nowhere.
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # kept, and compared by its tag each time: a new version is seen at once
}


class PageFile(NamedTuple):
    content: bytes
    headers: dict[str, str]


def page_files() -> dict[str, PageFile]:
    """The files by their names, read once: a request names one of them, never a path."""
    return {path.name: _file(path) for path in sorted(DIRECTORY.iterdir()) if path.suffix in TYPES}


def _file(path: Path) -> PageFile:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    kind = f"{TYPES[path.suffix]}; charset=utf-8"
    return PageFile(content, {**HEADERS, "etag": tag, "content-type": kind})


def add_page_routes(api: FastAPI, gateway: Gateway) -> None:
    files = page_files()

    @api.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return _answer(files[INDEX], request)

    @api.get("/page/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise GatewayError(404, "the page has no such file; / is where it begins")
        return _answer(files[name], request)

    @api.get("/everbatch/live", include_in_schema=False)
    async def live(request: Request, hz: str = str(USUAL_HZ)) -> Response:
        gateway.check_right(READ_METRICS, visit_of(request.scope))
        rate, longest_s = rate_of(hz), gateway.settings.request_timeout_s

        async def work(out: Outlet) -> None:
            async with aclosing(gateway.live.events(gateway.link, rate)) as events:
                try:
                    async with asyncio.timeout(longest_s):
                        async for event in events:
                            await out.event(event)
                except TimeoutError:
                    pass  # The viewer comes again, and its key is compared again.
            await out.end_of_events()

        return Answer(work, gateway.viewers, 1, longest_s + MARGIN_S, away_event)


def _answer(file: PageFile, request: Request) -> Response:
    """The file, or 304 where the browser has it. A HEAD request gets the headers alone from the server."""
    if file.headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(None, 304, file.headers)
    return Response(file.content, 200, file.headers)
