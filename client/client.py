"""EverbatchClient: text in, text out, over gRPC or HTTP, plain or with TLS.

with EverbatchClient("127.0.0.1:8001") as client:
    for chunk in client.stream("def main(", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, Unpack, overload

from client.address import ProtocolName
from client.checks import check_request_id, check_timeout
from client.errors import ClientError, Unavailable
from client.messages import Completion, GenerateRequest, Message, TextChunk
from client.options import GenerateOptions, make_request
from client.resuming import Progress
from client.retry import Retry
from client.settings import DEFAULT_MODEL, DEFAULT_TIMEOUT_S, Settings, make_settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from client.conversation import Conversation
    from client.embedding import Tensors


class Transport(Protocol):
    """A protocol by which requests reach a server."""

    def stream(
        self, request: GenerateRequest, timeout_s: float, request_id: str
    ) -> Generator[TextChunk, None, None]: ...
    def infer(
        self, model: str, tensors: Tensors, parameters: dict[str, str | int], timeout_s: float
    ) -> dict[str, list[Any]]: ...
    def ask(self, request: dict[str, Any], timeout_s: float, model: str) -> dict[str, Any]: ...

    def close(self) -> None: ...


class EverbatchClient:
    """A connection to one text model of one server. Threads may share it."""

    def __init__(
        self,
        url: str | None = None,
        protocol: ProtocolName | None = None,
        model: str = DEFAULT_MODEL,
        namespace: str = "",
        api_key: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: Retry | None = None,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """`url`: HOST:PORT or grpc://HOST:PORT (gRPC), grpcs://HOST:PORT (gRPC with TLS), http://HOST:PORT or
        https://HOST:PORT; a server on this machine with its default ports when unset. `protocol`: for a URL that does not
        say it; gRPC when unset.

        `namespace`: of every request that names none itself; only requests of one namespace share sessions and, token
        by token, cached KV. Empty: anonymous.

        `api_key`: for a gateway in front of the server, sent as `Authorization: Bearer KEY`. None: the environment
        variable EVERBATCH_API_KEY, where it is set. Empty: no key is sent.

        `timeout_s`: seconds that a request may take, its repetitions and all of its answer included, unless it names
        others. `retry`: how often it is sent again after UNAVAILABLE; None: the defaults of Retry.

        `ca_file`: certificates in PEM form to trust, in place of the system's (HTTP) or gRPC's own.

        Raises TypeError and ValueError that name the argument. No connection is made yet.
        """
        self._settings = make_settings(
            url, protocol, model, namespace, api_key, timeout_s=timeout_s, retry=retry, ca_file=ca_file
        )
        self._transport = open_transport(self._settings)

    @property
    def settings(self) -> Settings:
        """The checked settings that the client was made with."""
        return self._settings

    @property
    def url(self) -> str:
        return self._settings.address.url

    @property
    def namespace(self) -> str:
        """The namespace of requests that name none. It cannot be changed: a conversation would lose its session."""
        return self._settings.namespace

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The whole answer at once; arguments as for stream(). Raises ClientError."""
        request = make_request(prompt, messages, options, stream=False)
        return Completion.from_chunks(self.send(request, timeout_s=timeout_s, request_id=request_id))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The whole reply to `messages`, by the model's chat template. Raises ClientError."""
        return self.generate(messages=messages, timeout_s=timeout_s, request_id=request_id, **options)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        **options: Unpack[GenerateOptions],
    ) -> Generator[TextChunk, None, None]:
        """Yield pieces of text as they are generated; the last has `final` set. `request_id`: for a `stop` request.

        Closing the iterator (or leaving the loop) cancels the request. A server that does not stream
        (`triton.decoupled=false`) sends all of its answer as one piece. Raises TypeError and ValueError before anything is
        sent, and ClientError from the iterator, also in mid-stream.
        """
        request = make_request(prompt, messages, options)
        return self.send(request, timeout_s=timeout_s, request_id=request_id)

    def send(
        self, request: GenerateRequest, *, timeout_s: float | None = None, request_id: str = ""
    ) -> Generator[TextChunk, None, None]:
        """stream() for a request that is already a value. `timeout_s`: seconds from the first step of the iteration until
        the final chunk.
        """
        request, patience = prepared(self._settings, request, timeout_s, request_id)
        return repeated(self._transport, self._settings.retry, request, patience, request_id)

    def embed(
        self,
        texts: Iterable[str],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        """The embeddings of texts, [texts, dimensions], by the server's model `embedding`; `model` of this client means nothing
        here. `dimensions`: to which vectors are cut; `normalize`: whether their length is 1, the model's own way when unset.
        Raises TypeError, ValueError and ClientError.
        """
        from client.embedding import embed

        return embed(self._transport, self._settings, texts, dimensions, normalize, timeout_s)

    def look(self, *, model: str = "everbatch", timeout_s: float = 5.0) -> dict[str, Any]:
        """Return a view of the engine: rows of the batch, queue, KV blocks and counters (docs/top.md). `model`: of the kind of
        `everbatch`, such as `code.everbatch` on a server of several models. Raises ClientError.
        """
        live = self._transport.ask({"look": True}, timeout_s, model).get("live")
        if not isinstance(live, dict):
            raise Unavailable("the server does not say what its engine does: it is of an older version, or another one")
        return live

    def conversation(self, system: str | None = None, **options: Unpack[GenerateOptions]) -> Conversation:
        """A conversation of several turns in a session of the server; `options` hold for every turn."""
        from client.conversation import Conversation

        return Conversation(self, system, **options)

    @overload
    def map(
        self,
        prompts: Iterable[str | Sequence[Message]],
        *,
        concurrency: int = ...,
        progress: bool = ...,
        on_error: Literal["raise"] = ...,
        timeout_s: float | None = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]: ...

    @overload
    def map(
        self,
        prompts: Iterable[str | Sequence[Message]],
        *,
        concurrency: int = ...,
        progress: bool = ...,
        on_error: Literal["return"],
        timeout_s: float | None = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion | ClientError]: ...

    def map(
        self,
        prompts: Iterable[str | Sequence[Message]],
        *,
        concurrency: int = 8,
        progress: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion] | list[Completion | ClientError]:
        """Whole answers to many prompts (texts, or lists of messages), in their order; `concurrency` at the same time.

        `timeout_s`: for each. `progress`: a bar on standard error. `on_error`: "raise" cancels the rest at the first
        ClientError and raises it, "return" puts it in the place of the answer. Ctrl-C cancels all.
        """
        from client.batch import run_batch

        return run_batch(self._settings, prompts, concurrency, progress, on_error, timeout_s, options)

    def close(self) -> None:
        """End the connection; streams that still run on it are cancelled."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_transport(settings: Settings) -> Transport:
    if settings.address.protocol == "grpc":
        from client.grpc_transport import GrpcTransport  # These imports take half a second.

        return GrpcTransport(settings)
    from client.http_transport import HttpTransport

    return HttpTransport(settings)


def prepared(
    settings: Settings, request: GenerateRequest, timeout_s: float | None, request_id: str
) -> tuple[GenerateRequest, float]:
    """The request with what the client adds, checked, and the seconds it has. Raises TypeError and ValueError."""
    patience = settings.timeout_s if timeout_s is None else timeout_s
    check_timeout(patience)
    check_request_id(request_id)
    if request.namespace is None:
        request = replace(request, namespace=settings.namespace)
    request.check()
    return request.with_seed(), float(patience)


def repeated(
    transport: Transport, retry: Retry, request: GenerateRequest, timeout_s: float, request_id: str
) -> Generator[TextChunk, None, None]:
    """The chunks of a request, each once. It is sent again as `next_attempt` says, as long as time is left."""
    deadline = time.monotonic() + timeout_s
    attempt, progress = 0, Progress()
    while True:
        progress.begin()
        try:
            remaining_s = deadline - time.monotonic() if attempt else timeout_s
            with closing(transport.stream(request, remaining_s, request_id)) as chunks:
                for chunk in chunks:
                    if (new := progress.take(chunk)) is not None:
                        yield new if request.seed is None else replace(new, seed=request.seed)
            return
        except ClientError as error:
            now = time.monotonic()
            again = next_attempt(request, retry, attempt, error, progress, now)
            if again is None or now + again.pause_s >= deadline:
                raise
        time.sleep(again.pause_s)
        request = again.request
        attempt += 1


class NextAttempt(NamedTuple):
    """The request to send after an error, and the seconds to wait before."""

    request: GenerateRequest
    pause_s: float


def next_attempt(
    request: GenerateRequest, retry: Retry, attempt: int, error: ClientError, progress: Progress, now_s: float
) -> NextAttempt | None:
    """What to send after an error: the request again after UNAVAILABLE, one for the whole answer where the server does not
    stream; None: nothing. `attempt`: that failed, the first is 0. `progress`: what has come of it. `now_s`: monotonic.
    """
    if progress.has_begun:
        pause_s = progress.pause_s(error, retry.resume_s, now_s) if request.repeatable else None
        return None if pause_s is None else NextAttempt(request, pause_s)
    if request.stream and error.refuses_streams:
        return NextAttempt(replace(request, stream=False), 0.0)
    pause_s = retry.pause_s(attempt, error) if request.repeatable else None
    return None if pause_s is None else NextAttempt(request, pause_s)
