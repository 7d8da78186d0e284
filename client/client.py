"""EverbatchClient: text in, text out, over gRPC or HTTP.

with EverbatchClient("127.0.0.1:8001") as client:
    for chunk in client.stream("def main(", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from client.messages import Completion, GenerateRequest, TextChunk, check_api_key, check_namespace

API_KEY_VARIABLE = "EVERBATCH_API_KEY"
DEFAULT_TIMEOUT_S = 600.0
DEFAULT_URLS = {"grpc": "127.0.0.1:8001", "http": "http://127.0.0.1:8000"}


class Transport(Protocol):
    """A protocol by which requests reach a server."""

    url: str

    def stream(
        self, request: GenerateRequest, timeout_s: float, request_id: str
    ) -> Generator[TextChunk, None, None]: ...
    def close(self) -> None: ...


class EverbatchClient:
    """A connection to one text model of one server. Threads may share it."""

    def __init__(
        self,
        url: str | None = None,
        protocol: Literal["grpc", "http"] = "grpc",
        model: str = "ensemble",
        namespace: str = "",
        api_key: str | None = None,
    ) -> None:
        """`url`: HOST:PORT (gRPC) or http://HOST:PORT; a server on this machine with its default ports when unset.

        `namespace`: of every request that names none itself; only requests of one namespace share sessions and, token
        by token, cached KV. Empty: anonymous.

        `api_key`: for a gateway in front of the server, sent as `Authorization: Bearer KEY`. None: the environment
        variable EVERBATCH_API_KEY, where it is set. Empty: no key is sent.

        Raises ValueError for an unknown protocol, and for a namespace or a key that cannot be sent.
        """
        check_namespace(namespace)
        key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
        check_api_key(key)
        self._namespace = namespace
        if protocol not in DEFAULT_URLS:
            raise ValueError(f"protocol is {protocol!r}, grpc or http is expected")
        address = url or DEFAULT_URLS[protocol]
        if protocol == "grpc":
            from client.grpc_transport import GrpcTransport  # These imports take half a second.

            self._transport: Transport = GrpcTransport(
                address.removeprefix("grpc://").removeprefix("http://"), model, key
            )
        else:
            from client.http_transport import HttpTransport

            self._transport = HttpTransport(address, model, key)

    @property
    def url(self) -> str:
        return self._transport.url

    @property
    def namespace(self) -> str:
        """The namespace of requests that name none. It cannot be changed: a conversation would lose its session."""
        return self._namespace

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, str]] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        request_id: str = "",
        **options: Any,
    ) -> Generator[TextChunk, None, None]:
        """Yield pieces of text as they are generated; the last has `final` set. `options`: fields of GenerateRequest.

        Closing the iterator (or leaving the loop) cancels the request. Raises ClientError, also in mid-stream, and
        ValueError before anything is sent.
        """
        request = GenerateRequest(prompt=prompt, messages=messages, **options)
        request.check()
        return self.send(request, timeout_s=timeout_s, request_id=request_id)

    def send(
        self, request: GenerateRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S, request_id: str = ""
    ) -> Generator[TextChunk, None, None]:
        """stream() for a request that is already a value. `timeout_s`: seconds from now until the final chunk."""
        if request.namespace is None:
            request = replace(request, namespace=self.namespace)
        return self._transport.stream(request, timeout_s, request_id)

    def generate(self, prompt: str | None = None, **options: Any) -> Completion:
        """The whole answer at once; arguments as for stream(). Raises ClientError."""
        options.setdefault("stream", False)
        return Completion.from_chunks(self.stream(prompt, **options))

    def close(self) -> None:
        """End the connection; streams that still run on it are cancelled."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
