"""The requests that once did harm, one by one; the numbers are those of the rows in docs/lab/reliability.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

from tests.hostile import grpc_messages, served
from tests.hostile.case import Case, GrpcCall, HttpExchange
from tests.hostile.grpc_messages import add_input, packed, put
from tests.hostile.http_cases import base, body, post

MIB = 1 << 20


def two_rows_one_refused(model: str) -> Case:
    """2: the second row is refused while the first one streams."""
    message = grpc_messages.base(model, rows=2, max_tokens=30)
    add_input(message, "temperature", "FP32", [2, 1], packed("FP32", 1.0, -7.0))
    put(message, model, served.Tensor(served.stream_flag(model) or "", (1,), [True]), 2)
    call = GrpcCall("ModelStreamInfer", (message.SerializeToString(),))
    return Case("named-02", "two rows, one refused while the other streams", model, call)


def salt(model: str, num_bytes: int) -> Case:
    """4: a cache_salt whose frame to the engine would exceed its cap."""
    data = body(base(model) | {"cache_salt": '"' + "s" * num_bytes + '"'})
    return post("named-04", f"cache_salt of {num_bytes >> 20} MiB", model, data)


def bias_words(model: str, num_bytes: int) -> Case:
    """5: bias words without a limit on their bytes."""
    words = {"embedding_bias_words": json.dumps(["word " * (num_bytes // 5)]), "embedding_bias_weights": "[1.0]"}
    return post("named-05", f"embedding_bias_words of {num_bytes} bytes", model, body(base(model) | words))


def messages(model: str, number: int, name: str, text: str) -> Case:
    own = base(model) if model == "tensorrt_llm" else {"text_input": '""'}
    return post(f"named-{number:02}", name, model, body({"max_tokens": "2", "messages": json.dumps(text)} | own))


def raw_field(model: str, number: int, name: str, field: bytes) -> Case:
    """A request that is served but for one more field."""
    return post(f"named-{number:02}", name, model, body(base(model))[:-1] + b", " + field + b"}")


@cache
def small() -> tuple[Case, ...]:
    """Every named request that is small, to every model that has its inputs."""
    texts: tuple[Callable[[str], Case], ...] = (
        lambda model: messages(model, 10, "a lone surrogate as role", '[{"role": "\\ud800", "content": "a"}]'),
        lambda model: messages(model, 10, "a lone surrogate as content", '[{"role": "user", "content": "\\ud800"}]'),
        lambda model: messages(
            model, 10, "a lone surrogate as key", '[{"role": "user", "content": "a", "\\ud800": "b"}]'
        ),
        lambda model: messages(
            model, 12, "an integer of 4,400 digits", f'[{{"role": "user", "content": {"1" * 4400}}}]'
        ),
        lambda model: bias_words(model, 100_000),
    )
    everywhere: tuple[Callable[[str], Case], ...] = (
        two_rows_one_refused,
        two_rows_one_refused,
        lambda model: raw_field(model, 11, "an id of the byte 255", b'"id": "\xff"'),
        lambda model: raw_field(model, 11, "a stop for an id that is no UTF-8", b'"stop": true, "id": "\xed\xa0\x80"'),
        lambda model: raw_field(model, 12, "a parameter that is no UTF-8", b'"cache_salt": "\xff"'),
        lambda model: raw_field(model, 12, "a parameter's name that is no UTF-8", b'"\xff": "a"'),
        lambda model: raw_field(model, 12, "an id of 1 MB", b'"id": "' + b"i" * 1_000_000 + b'"'),
        lambda model: raw_field(
            model, 12, "an id of 1 MB that is refused", b'"id": "' + b"i" * 1_000_000 + b'", "beam_width": 9'
        ),
        lambda model: salt(model, 300),
        lambda model: salt(model, MIB),
    )
    cases = [make(model) for make in texts for model in ("ensemble", "tensorrt_llm_bls")]
    return (*cases, *(make(model) for make in everywhere for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")))


def large() -> list[Case]:
    """One by one, never beside others: bodies that cost time and memory. The first two end a tritonserver 24.10
    whose stack is smaller than they need.
    """
    nested = HttpExchange((_request_of(b"[" * (4 << 20)),))
    chunked = HttpExchange((_chunked_head(), *[b"1\r\n \r\n" * 1_000_000] * 18, b"0\r\n\r\n"))
    cases = [
        Case("named-01", "4 M nested lists in a body", "ensemble", nested),
        Case("named-01", "18 M chunks of one byte", "ensemble", chunked),
        *(salt(model, 257 * MIB) for model in ("ensemble", "tensorrt_llm")),
        *(bias_words("ensemble", size) for size in (10_000_000, 50_000_000)),
    ]
    return [Case(c.kind, c.name, c.model, c.call, large=True) for c in cases]


def _request_of(data: bytes) -> bytes:
    return (
        b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data)
        + data
    )


def _chunked_head() -> bytes:
    return b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
