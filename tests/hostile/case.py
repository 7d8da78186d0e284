"""What a hostile request is: bytes for an HTTP connection, or messages for a gRPC call, and how the client behaves."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class HttpExchange:
    """`pieces` are written to one connection in order. `leave_after`: close after that many bytes of the answer."""

    pieces: tuple[bytes, ...]
    leave_after: int | None = None
    half_close: bool = False  # the client says that it will send no more
    to_gateway: bool = False  # sent to the OpenAI endpoint, not to tritonserver


@dataclass(frozen=True)
class GrpcCall:
    """`messages` are serialised (or garbled) ModelInferRequests. `leave_after`: cancel after that many responses."""

    method: str  # ModelStreamInfer or ModelInfer
    messages: tuple[bytes, ...]
    grpc_error: bool = False  # sends the metadata triton_grpc_error: true
    leave_after: int | None = None
    keep_open: bool = False  # the client's side stays open until every message has been answered
    tells_ends: bool = True  # each message asks that its end be told, so that the ends of a stream can be counted


@dataclass(frozen=True)
class Case:
    """One request. `kind` is its class, `name` says in a few words what is wrong with it."""

    kind: str
    name: str
    model: str
    call: HttpExchange | GrpcCall
    incomplete: bool = False  # the server rightly waits for the rest, or hangs up: no answer is expected
    string_length: bool = False  # holds a STRING tensor whose length is wrong
    large: bool = False

    @property
    def size(self) -> int:
        """The number of bytes that the client sends."""
        return sum(map(len, self.call.pieces if isinstance(self.call, HttpExchange) else self.call.messages))

    @property
    def known_fatal(self) -> bool:
        """Whether triton_grpc_error makes it fatal to tritonserver, by a documented bug that no model can prevent."""
        return self.string_length or (isinstance(self.call, GrpcCall) and len(self.call.messages) > 1)

    def with_grpc_error(self, wanted: bool) -> Case:
        """The same case, if it is a gRPC call with or without the metadata."""
        if not isinstance(self.call, GrpcCall):
            return self
        return replace(self, call=replace(self.call, grpc_error=wanted))
