"""Malformed HTTP itself: lengths, chunks, headers, methods, paths."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.hostile import values
from tests.hostile.case import Case, HttpExchange
from tests.hostile.http_cases import base, body
from tests.hostile.served import GATEWAY

LENGTHS = ("-1", "", "x", "1, 2", "+3", "0x10", "99999999999999999999", "18446744073709551615", "3 ", " 7", "1e3")


def _case(name: str, model: str, *pieces: bytes, half_close: bool = True) -> Case:
    call = HttpExchange(pieces, half_close=half_close, to_gateway=model == GATEWAY)
    return Case("http-framing", name, model, call, incomplete=True)


def _head(model: str, *headers: str, method: str = "POST", version: str = "HTTP/1.1", path: str = "") -> bytes:
    usual = "/v1/chat/completions" if model == GATEWAY else f"/v2/models/{model}/generate"
    kind = ["Content-Type: application/json"] if model == GATEWAY else []
    return "\r\n".join((f"{method} {path or usual} {version}", "Host: localhost", *kind, *headers, "", "")).encode(
        "utf-8", "surrogatepass"
    )


def wrong_length(rng: random.Random, model: str) -> Case:
    data = body(base(model))
    length = rng.choice((*LENGTHS, str(len(data) - 5), str(len(data) + 7), "0", str(2**31), str(2**40)))
    headers = [f"Content-Length: {length}"]
    if rng.random() < 0.2:
        headers.append(f"Content-Length: {len(data)}")
    return _case(f"Content-Length {length}", model, _head(model, *headers), data)


def chunks(rng: random.Random, model: str) -> Case:
    """Chunked bodies: one byte each, odd sizes, odd extensions, no end, with a length beside them."""
    data = body(base(model))
    size = rng.choice((1, 1, 5, len(data)))
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    extension = rng.choice(("", "", ";a=b", ";" + "x" * 500, " "))
    lines = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension.encode(), part) for part in parts)
    end = rng.choice(
        (
            b"0\r\n\r\n",
            b"0\r\n\r\n",
            b"0\r\nTrailer: x\r\n\r\n",
            b"",
            b"-1\r\n\r\n",
            b"ffffffffffffffff\r\n",
            b"zz\r\n",
            b"0\r\n\r\n0\r\n\r\n",
        )
    )
    beside = ["Content-Length: 5"] if rng.random() < 0.2 else []
    encoding = rng.choice(("chunked", "chunked", "Chunked", "gzip, chunked", "identity", "xchunked"))
    return _case(
        f"chunks of {size}, then {end[:8]!r}",
        model,
        _head(model, f"Transfer-Encoding: {encoding}", *beside),
        lines,
        end,
    )


def many_chunks(rng: random.Random, model: str) -> Case:
    """A body of spaces in chunks of one byte, far below what overflows a stack."""
    count = rng.choice((500, 5000, 20_000))
    return _case(
        f"{count} chunks of one byte",
        model,
        _head(model, "Transfer-Encoding: chunked"),
        b"1\r\n \r\n" * count + b"0\r\n\r\n",
    )


def headers(rng: random.Random, model: str) -> Case:
    data = body(base(model))
    odd = rng.choice(
        (
            ["X: " + "y" * rng.choice((1000, 70_000, 300_000))],
            [f"X{n}: {n}" for n in range(rng.choice((100, 2000)))],
            ["NoColon"],
            [": empty"],
            ["X:" + values.text(rng).replace("\r", "").replace("\n", "")],
            ["Expect: 100-continue"],
            ["Connection: close, keep-alive, upgrade", "Upgrade: websocket"],
            ["Content-Encoding: " + rng.choice(("gzip", "deflate", "br", "x" * 100))],
            ["Content-Type: " + rng.choice(("text/plain", "multipart/form-data; boundary=", "\xff", ""))],
            ["Accept: " + "a/" * 2000],
            ["Inference-Header-Content-Length: " + rng.choice(("-1", "x", "99999999999999999999", "0"))],
            ["triton-grpc-protocol-x: y", "x-everbatch-admin: " + "0" * 32],
            ["Range: bytes=" + ",".join(f"{n}-" for n in range(500))],
            [" folded: header", "\tand: more"],
        )
    )
    return _case(f"header {odd[0][:24]!r}", model, _head(model, *odd, f"Content-Length: {len(data)}"), data)


PATHS = (
    *(
        "/",
        "//",
        "/v2",
        "/v2/",
        "/v3",
        "/v2/models",
        "/v2/models//generate",
        "/v2/models/{m}/versions/9/generate",
        "/%00",
        "/%ff",
    ),
    *(
        "/v2/models/{m}/versions/x/generate",
        "/v2/models/{m}/versions/99999999999999999999/generate",
        "/v2/models/..%2f../generate",
    ),
    *(
        "/v2/models/../../../../etc/generate",
        "/v2/models/%2e%2e/config",
        "/v2/models/{m}/nothing",
        "/v2/models/{m}/infer/../generate",
    ),
    *(
        "/v2/repository/index",
        "/v2/repository/models/{m}/unload",
        "/v2/repository/models/{m}/load",
        "/v2/logging",
        "/v2/trace/setting",
    ),
    *(
        "/v2/systemsharedmemory/status",
        "/v2/systemsharedmemory/region/r/register",
        "/v2/cudasharedmemory/region/r/register",
    ),
    *(
        "/v2/models/{m}/config",
        "/v2/models/{m}/stats",
        "/v2/models/{m}/ready",
        "/v2/health/ready",
        "/metrics",
        "/generate?x=" + "y" * 9000,
    ),
    *(
        "http://127.0.0.1:9/v2",
        "*",
        "/v2/models/" + "a" * 20_000 + "/generate",
        "/v2/models/{m}/generate?a=%zz&b[]=1",
        "?",
        "/v2#x",
    ),
)


def paths(rng: random.Random, model: str) -> Case:
    """Other paths and methods; the guarded ones without their key."""
    data = rng.choice((b"", body(base(model)), b'{"key": "k", "offset": 0, "byte_size": 8}', b"[]"))
    path = rng.choice(PATHS).replace("{m}", model)
    method = rng.choice(
        ("POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "HEAD", "X" * 500, "get", "")
    )
    return _case(
        f"{method[:10]} {path[:50]}",
        model,
        _head(model, f"Content-Length: {len(data)}", method=method, path=path),
        data,
    )


def versions(rng: random.Random, model: str) -> Case:
    data = body(base(model))
    version = rng.choice(("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP", "", "HTTP/1.1 x", "HTTP/11111111111"))
    return _case(f"version {version!r}", model, _head(model, f"Content-Length: {len(data)}", version=version), data)


def garbage(rng: random.Random, model: str) -> Case:
    """No HTTP at all: random bytes, TLS, HTTP/2, line ends."""
    junk = rng.choice(
        (
            rng.randbytes(300),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\r\n" * 500,
            b"\0" * 2000,
        )
    )
    return _case(f"bytes {junk[:8]!r}", model, junk)


def unfinished(rng: random.Random, model: str) -> Case:
    """A request that stops midway: the server waits for the rest until the client leaves."""
    whole = _head(model, f"Content-Length: {len(body(base(model)))}") + body(base(model))
    part = whole[: rng.randrange(len(whole))]
    return _case("a part of a request", model, part, half_close=rng.random() < 0.5)


def pipelined(rng: random.Random, model: str) -> Case:
    """Several requests at once on one connection, the client leaves after the first answer."""
    data = body(base(model))
    one = _head(model, f"Content-Length: {len(data)}") + data
    return _case("pipelined requests", model, one * rng.randrange(2, 9))


_WAYS: tuple[Callable[[random.Random, str], Case], ...] = (
    *(wrong_length, chunks, many_chunks, headers, paths, paths, versions, garbage, unfinished, pipelined),
)


def framing(rng: random.Random, model: str) -> Case:
    return rng.choice(_WAYS)(rng, model)
