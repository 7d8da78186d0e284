"""Malformed requests to the OpenAI endpoint."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.hostile import json_cases, values
from tests.hostile.case import Case, HttpExchange
from tests.hostile.served import GATEWAY

PATHS = tuple(path for path in json_cases.SERVED if path.startswith("/"))
GENERATING = (*("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/chat/interactive"),)
# The field of each that says how long an answer is, where it is another one than max_tokens.
_LENGTHS = {"/v1/responses": "max_output_tokens", "/v1/chat/interactive": "request_output_len"}
_SEVERAL = ("/v1/chat/completions", "/v1/completions")  # those that give several choices
_JSON = "Content-Type: application/json\r\n"


def exchange(
    data: bytes, path: str, headers: str = _JSON, method: str = "POST", leave_after: int | None = None
) -> HttpExchange:
    """One well-framed request."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    return HttpExchange((head.encode("utf-8", "surrogatepass") + data,), leave_after, to_gateway=True)


def fields(rng: random.Random, model: str) -> Case:
    """A body with odd values, names, depths or bytes."""
    path = rng.choice(PATHS)
    data = json_cases.request_text(rng, path)
    if rng.random() < 0.3 and data.endswith(b"}"):
        data = data[:-1] + b', "stream": true}'
    return Case("gateway-fields", f"{path}: {data[:30]!r}", GATEWAY, exchange(data, path))


HEADERS = (
    *("", "Content-Type: text/plain\r\n", "Content-Type: application/json; charset=utf-16\r\n", "Content-Type: \r\n"),
    *(
        _JSON + "Content-Encoding: gzip\r\n",
        _JSON + "Authorization: Bearer \xff\r\n",
        _JSON + "X: " + "y" * 60_000 + "\r\n",
    ),
    *(
        _JSON + "Authorization: " + "Bearer " * 3000 + "\r\n",
        _JSON + "Expect: 100-continue\r\n",
        _JSON + "Cookie: a=b\r\n",
    ),
    *(
        _JSON + "Accept: x/y\r\n",
        _JSON + "Upgrade: websocket\r\nConnection: Upgrade\r\n",
        _JSON + "Range: bytes=0-1\r\n",
    ),
)
ROUTES = (
    *(
        "/",
        "/v1",
        "/v1/",
        "/v1/models",
        "/v1/models/",
        "/v1/models/nothing",
        "/v1/models/" + "m" * 9000,
        "/v1/models/%00",
    ),
    *(
        "/v1/models/..%2f..%2fetc",
        "/v1/embeddings",
        "/v1/audio/speech",
        "/health",
        "/metrics",
        "/openapi.json",
        "/docs",
    ),
    *(
        "/v1/responses/resp_nobody",
        "/v1/responses/%ff",
        "/v1/responses/" + "r" * 9000,
        "/v1//chat/completions",
        "//",
        "*",
    ),
    *(
        "/v1/chat/completions/",
        "/v1/chat/completions?a=" + "b" * 9000,
        "/v1/responses/x/cancel",
        "/v1/admin/models",
        "/v1/admin/models/everbatch/unload",
        "/v1/admin/models/%00/load",
        "/v1/admin/models/" + "m" * 9000 + "/replace",
        "/everbatch/live?hz=nan",
        "/everbatch/live?hz=1e308",
        "/v1/loads?model=%00",
        "/v1/conversations/interactive_1/items",
        "/v1/files",
        "/v2",
        "/%",
    ),
)


def routes(rng: random.Random, model: str) -> Case:
    """Other paths, methods and headers."""
    path = rng.choice((*ROUTES, *PATHS, *PATHS))
    method = rng.choice(("POST", "POST", "GET", "GET", "PUT", "DELETE", "OPTIONS", "TRACE", "X" * 300, "get"))
    data = rng.choice((b"", json_cases.object_text(json_cases.SERVED[PATHS[0]]), rng.randbytes(60)))
    call = exchange(data, path, rng.choice(HEADERS), method)
    return Case(
        "gateway-routes", f"{method[:10]} {path[:40]}", GATEWAY, call, incomplete="Expect" in str(call.pieces[0])
    )


def left(rng: random.Random, model: str) -> Case:
    """A client that leaves, at once or midway, from one reply or from many."""
    path = rng.choice(GENERATING)
    fields = dict(json_cases.SERVED[path]) | {"stream": rng.choice(("true", "true", "false"))}
    fields[_LENGTHS.get(path, "max_tokens")] = str(rng.choice((20, 300)))
    if path in _SEVERAL:
        fields["n"] = str(rng.choice((1, 1, 4, 16)))
    call = exchange(json_cases.object_text(fields), path, leave_after=rng.choice((0, 1, 200, 900, 5000)))
    return Case("gateway-left", f"{path}: the client leaves", GATEWAY, call)


def conversations(rng: random.Random, model: str) -> Case:
    """Responses that go on from others that are unknown or deleted, are kept or not, and are looked up and deleted."""
    name = rng.choice(("resp_nobody", "resp_" + "0" * 32, values.text(rng)[:64], "x"))
    if rng.random() < 0.4:
        path = "/v1/responses/" + "".join(sign if sign.isalnum() else "%25" for sign in name)
        return Case("gateway-responses", path[:50], GATEWAY, exchange(b"", path, "", rng.choice(("GET", "DELETE"))))
    fields = dict(json_cases.SERVED["/v1/responses"])
    fields["store"] = rng.choice(("true", "false", "null", "1"))
    fields["stream"] = rng.choice(("true", "false"))
    if rng.random() < 0.5:
        fields["previous_response_id"] = json_cases.odd_value(rng, "previous_response_id")
    call = exchange(json_cases.object_text(fields), "/v1/responses")
    return Case("gateway-responses", "a conversation", GATEWAY, call)


def many(rng: random.Random, model: str) -> Case:
    """Many choices and prompts in one request: up to and over the limits, with odd ids among them."""
    prompts = rng.choice(('["a"]', "[[5]]", "[[5], [99999999]]", '["a", ""]', '["' + "x " * 5000 + '", "a"]'))
    count = rng.choice((1, 3, 40, 200))
    prompts = prompts[:-1] + (", " + prompts[1:-1]) * (count - 1) + "]"
    fields = json_cases.SERVED["/v1/completions"] | {"prompt": prompts, "n": str(rng.choice((1, 2, 16, 128)))}
    fields["stream"] = rng.choice(("true", "false"))
    return Case(
        "gateway-many", f"{count} prompts", GATEWAY, exchange(json_cases.object_text(fields), "/v1/completions")
    )


KINDS: dict[str, Callable[[random.Random, str], Case]] = {
    "gateway-fields": fields,
    "gateway-routes": routes,
    "gateway-left": left,
    "gateway-responses": conversations,
    "gateway-many": many,
}
