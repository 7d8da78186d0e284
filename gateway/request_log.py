"""The one line that each request leaves in the log: what was asked for, what became of it, and how long it took.

Nothing in it is a client's own text. Of a path only the words are shown that a route has as well, of a parameter that is
refused the known name that it has or resembles.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from gateway.request_context import RequestContext

MOST_WORDS = 8  # the most words of an unknown path that a line shows
_log = logging.getLogger("everbatch.gateway")


class RouteNames:
    """The routes as they are declared. Whether a request came as far as its route makes no difference."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._words = {word for route in self._routes for word in route.path.split("/") if not word.startswith("{")}

    def of(self, scope: Scope) -> str | None:
        """The route of a request, by another method than its own too; None: there is none."""
        found = (route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        return next(found, None)

    def masked(self, path: str) -> str:
        """An unknown path, with a star for each word that no route has."""
        words = path.split("/", MOST_WORDS)[:MOST_WORDS]
        return "/".join(word if word in self._words else "*" for word in words)


def log_request(scope: Scope, route: str, context: RequestContext, seconds: float) -> None:
    """Write the line; `route` is one that is declared, or a masked path."""
    fields: dict[str, Any] = {
        "event": "http_request",
        "method": scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "DELETE") else "OTHER",
        "route": route,
        "status": context.status or None,
        "total_ms": round(seconds * 1000, 3),
        "prompt_tokens": context.prompt_tokens,
        "completion_tokens": context.completion_tokens,
        "request_id": context.request_id,
        "client_left": context.left or None,
        **_failure(context),
    }
    shown = {name: value for name, value in fields.items() if value is not None}
    _log.info("%s", _sentence(fields), extra={"fields": shown})


def _failure(context: RequestContext) -> dict[str, Any]:
    """The error that the client got, also at the end of a stream."""
    error = context.error
    return {} if error is None else {"error": error.code or error.kind(), "param": error.logged or None}


def _sentence(fields: dict[str, Any]) -> str:
    tokens = f"{fields['prompt_tokens']} prompt and {fields['completion_tokens']} completion tokens"
    head = f"{fields['method']} {fields['route']} {fields['status'] or '-'} {fields['total_ms']:.0f} ms"
    left = ", client left" if fields["client_left"] else ""
    error = f", {fields['error']}" if "error" in fields else ""
    param = f" ({fields['param']})" if fields.get("param") else ""
    return f"{head}, {tokens}, {fields['request_id']}{left}{error}{param}"
