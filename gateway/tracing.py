"""The headers of W3C Trace Context, which the gateway passes on: the models of the server make the spans (docs/tracing.md)."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

Caller = tuple[tuple[str, str], ...]  # parameters of a Triton request, by name
MAX_STATE = 512  # characters of tracestate; a longer one is left out
_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]{0,200})?")


def caller_of(headers: Headers) -> Caller:
    """The parameters of a Triton request that say which span has sent it. Headers of another form count as absent."""
    parents = headers.getlist("traceparent")
    if len(parents) != 1 or _PARENT.fullmatch(parents[0]) is None:
        return ()
    state = ",".join(headers.getlist("tracestate"))
    if not state or len(state) > MAX_STATE or not (state.isascii() and state.isprintable()):
        return (("traceparent", parents[0]),)
    return ("traceparent", parents[0]), ("tracestate", state)
