"""Requests over gRPC: ModelStreamInfer, one stream per request.

Cancelling a stream cancels every request on it, so none is ever shared. A deadline is always set, because a stream
whose server-side process died says nothing more. The stub is used directly rather than through tritonclient's callback
thread: iterating the call delivers the chunks in order, in the caller's thread, and its cancel() is the cancellation.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2_grpc  # type: ignore[import-untyped]

from client.errors import Cancelled, Unavailable
from client.grpc_messages import (
    CHANNEL_OPTIONS,
    Tensor,
    decode_outputs,
    encode_command,
    encode_infer,
    encode_request,
    read_answer,
    read_command_answer,
    rpc_failure,
)
from client.messages import GenerateRequest, TextChunk
from client.settings import Settings

NO_END = "the server ended the stream without a final response"


def open_channel(settings: Settings) -> Any:
    """A channel to the server, which is connected at its first request."""
    address = settings.address
    if address.tls:
        credentials = grpc.ssl_channel_credentials(settings.ca_pem)
        return grpc.secure_channel(address.authority, credentials, options=CHANNEL_OPTIONS)
    return grpc.insecure_channel(address.authority, options=CHANNEL_OPTIONS)


class GrpcTransport:
    """A channel to one server. Any thread; every request opens a stream of its own on it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._channel = open_channel(settings)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._closed = False

    def stream(self, request: GenerateRequest, timeout_s: float, request_id: str) -> Generator[TextChunk, None, None]:
        """Yield chunks until the final one. Leaving the iteration early cancels the request. Raises ClientError."""
        settings = self._settings
        if self._closed:
            raise Cancelled("the client is closed; make another")
        message = encode_request(request, settings.model, request_id, timeout_s)
        # The metadata `triton_grpc_error` is left out, because an error with it may end tritonserver 24.10. The text of an
        # error names its status anyway.
        with interrupts_deferred(lambda: None):
            call = self._stub.ModelStreamInfer(iter([message]), timeout=timeout_s, metadata=settings.metadata)
        is_complete = False
        try:
            for answer in _answers(call):
                chunk = read_answer(answer)
                is_complete = chunk.final
                yield chunk
                if is_complete:
                    return
            raise Unavailable(NO_END)
        except grpc.RpcError as error:
            if self._closed:
                raise Cancelled(f"the request to {settings.address.url} was cancelled") from None
            raise rpc_failure(error, settings.address, timeout_s, has_key=bool(settings.api_key)) from None
        finally:
            with interrupts_deferred(call.cancel if is_complete else lambda: None):
                if is_complete:
                    _read_to_its_end(call)
                call.cancel()  # Nothing happens when the stream is over already.

    def infer(
        self, model: str, tensors: Mapping[str, Tensor], parameters: Mapping[str, str | int], timeout_s: float
    ) -> dict[str, list[Any]]:
        """The outputs of a model that answers once, each as a flat list. Every tensor has a value a row. Raises ClientError."""
        settings = self._settings
        if self._closed:
            raise Cancelled("the client is closed; make another")
        message = encode_infer(model, tensors, parameters)
        try:
            answer = self._stub.ModelInfer(message, timeout=timeout_s, metadata=settings.metadata)
        except grpc.RpcError as error:
            raise rpc_failure(error, settings.address, timeout_s, has_key=bool(settings.api_key)) from None
        return decode_outputs(answer)

    def ask(self, request: dict[str, Any], timeout_s: float, model: str) -> dict[str, Any]:
        """The one answer of a model of the kind of `everbatch` to a command, both JSON objects. Raises ClientError."""
        settings = self._settings
        if self._closed:
            raise Cancelled("the client is closed; make another")
        call = self._stub.ModelStreamInfer(
            iter([encode_command(request, model)]), timeout=timeout_s, metadata=settings.metadata
        )
        try:
            found = [read_command_answer(answer) for answer in _answers(call)]
        except grpc.RpcError as error:
            raise rpc_failure(error, settings.address, timeout_s, has_key=bool(settings.api_key)) from None
        finally:
            call.cancel()
        if not found:
            raise Unavailable(NO_END)
        return found[0]

    def close(self) -> None:
        self._closed = True
        self._channel.close()


def _read_to_its_end(call: Any) -> None:
    """Triton keeps a request whose stream is cancelled after its last response, and its model can then not be unloaded."""
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass


def _answers(call: Any) -> Iterator[Any]:
    """The messages of a stream. KeyboardInterrupt is raised between them only, and at once. Raises grpc.RpcError."""
    while True:
        with interrupts_deferred(call.cancel):
            answer = next(call, None)
        if answer is None:
            return
        yield answer


@contextmanager
def interrupts_deferred(wake: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C beside grpc, whose Python code holds locks on the main thread: a KeyboardInterrupt raised there leaves a lock
    taken for ever, and every later call on the channel waits for it.

    Ctrl-C within the block calls `wake`, which should end what the block waits for; KeyboardInterrupt is raised when
    the block is left, instead of whatever it raised. Other threads, and programs with a SIGINT handler of their own, see
    no difference.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        wake()

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt from None
