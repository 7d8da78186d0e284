"""Send one case and read what comes back, until the end, the deadline or the client's own leaving."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tests.hostile.case import Case, GrpcCall, HttpExchange

INCOMPLETE_S = 0.3  # how long the client of an incomplete request waits before it leaves
# Fields of answers that hold generated text, or what the client has sent. The text of the default model is Python code.
GENERATED = (
    *("text_output", "response", "OUTPUT", "logprobs"),
    *("choices", "output", "delta", "text", "part", "item", "instructions", "metadata", "content", "content_block"),
)
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass
class Reply:
    """What came back. `ending`: answered, cut (the connection ended without an answer), left (by the client, as
    planned) or none (nothing within the deadline). `status`: of HTTP, or the number of a gRPC code (0 is OK).
    """

    ending: str
    protocol: str
    status: int = 0
    errors: str = ""  # texts of errors, joined
    other: str = ""  # the rest that a client can read, generated text left out
    seconds: float = 0.0
    ends: int | None = None  # of the requests on a gRPC stream that the server has ended by itself; None: not told


class Sender:
    """A client of one thread: a connection for each HTTP case, one gRPC channel."""

    def __init__(self, http_url: str, grpc_url: str, gateway_url: str, deadline_s: float = 30.0) -> None:
        self._triton, self._gateway = _address(http_url), _address(gateway_url)
        self._deadline_s = deadline_s
        self._channel = grpc.insecure_channel(grpc_url, options=CHANNEL_OPTIONS)

    def send(self, case: Case) -> Reply:
        began = time.monotonic()
        deadline = began + self._deadline_s
        if isinstance(case.call, HttpExchange):
            reply = self._http(case.call, deadline, case.incomplete)
        else:
            reply = self._grpc(case.call, began + 2 * INCOMPLETE_S if case.incomplete else deadline)
        reply.seconds = time.monotonic() - began
        return reply

    def close(self) -> None:
        self._channel.close()

    # ---- HTTP --------------------------------------------------------------------------------------------------------

    def _http(self, exchange: HttpExchange, deadline: float, incomplete: bool) -> Reply:
        address = self._gateway if exchange.to_gateway else self._triton
        try:
            with socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic())) as connection:
                try:
                    for piece in exchange.pieces:
                        connection.sendall(piece)
                except OSError:
                    pass  # the server hung up before it had read everything; it may have said why
                if exchange.leave_after == 0:
                    return Reply("left", "http")
                if incomplete:
                    return self._impatient(connection, exchange, deadline)
                return _read_http(connection, exchange.leave_after, deadline)
        except TimeoutError:
            return Reply("none", "http")
        except (OSError, http.client.HTTPException) as error:
            return Reply("cut", "http", other=type(error).__name__)

    @staticmethod
    def _impatient(connection: socket.socket, exchange: HttpExchange, deadline: float) -> Reply:
        """Wait a moment for the first byte of an answer that may never come; read an answer that has begun."""
        connection.settimeout(INCOMPLETE_S)
        try:
            if not connection.recv(1, socket.MSG_PEEK):
                return Reply("cut", "http")
        except TimeoutError:
            if not exchange.half_close:
                return Reply("left", "http")
            connection.shutdown(socket.SHUT_WR)
            try:
                if not connection.recv(1, socket.MSG_PEEK):
                    return Reply("cut", "http")
            except TimeoutError:
                return Reply("left", "http")
        return _read_http(connection, exchange.leave_after, deadline)

    # ---- gRPC --------------------------------------------------------------------------------------------------------

    def _grpc(self, call: GrpcCall, deadline: float) -> Reply:
        metadata = (("triton_grpc_error", "true"),) if call.grpc_error else ()
        path = f"/inference.GRPCInferenceService/{call.method}"
        timeout = max(0.1, deadline - time.monotonic())
        found = _Found()
        answered = threading.Event()
        try:
            if call.method == "ModelInfer":
                unary = self._channel.unary_unary(path, _as_it_is, service_pb2.ModelInferResponse.FromString)
                found.add(unary(call.messages[0], timeout=timeout, metadata=metadata), "")
            else:
                stream = self._channel.stream_stream(path, _as_it_is, service_pb2.ModelStreamInferResponse.FromString)
                requests = _requests(call, answered, timeout)
                return self._read_stream(stream(requests, timeout=timeout, metadata=metadata), call, found, answered)
        except grpc.RpcError as error:
            return found.failed(error)
        finally:
            answered.set()
        return found.reply("answered")

    @staticmethod
    def _read_stream(responses: Any, call: GrpcCall, found: _Found, answered: threading.Event) -> Reply:
        if call.leave_after == 0:
            responses.cancel()
            return found.reply("left")
        for response in responses:
            found.add(response.infer_response, response.error_message)
            if call.leave_after is not None and found.count >= call.leave_after:
                responses.cancel()
                return found.reply("left")
            if found.ends >= len(call.messages):
                answered.set()
        reply = found.reply("answered")
        reply.ends = found.ends if call.tells_ends and not call.grpc_error else None
        return reply


class _Found:
    """What a gRPC call has said so far."""

    def __init__(self) -> None:
        self.count = self.ends = 0
        self._errors: list[str] = []
        self._other: list[str] = []

    def add(self, response: Any, error: str) -> None:
        self.count += 1
        final = response.parameters["triton_final_response"].bool_param if response.parameters else False
        self.ends += bool(error or final)
        if error:
            self._errors.append(error)
        self._other.append(response.id[:4000])

    def reply(self, ending: str, status: int = 0) -> Reply:
        return Reply(ending, "grpc", status, "\n".join(self._errors), "\n".join(self._other))

    def failed(self, error: Any) -> Reply:
        """A call that ended with a status of its own."""
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return self.reply("none")
        cut = (
            "Socket closed",
            "Connection reset",
            "failed to connect",
            "Stream removed",
            "recvmsg",
            "GOAWAY",
            "Broken pipe",
        )
        if code == grpc.StatusCode.UNAVAILABLE and any(sign.lower() in details.lower() for sign in cut):
            return self.reply("cut")
        self._errors.append(details)
        return self.reply("answered", code.value[0])


def _address(url: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def _as_it_is(message: bytes) -> bytes:
    return message


def _requests(call: GrpcCall, answered: threading.Event, timeout_s: float) -> Iterator[bytes]:
    yield from call.messages
    if call.keep_open and call.leave_after is None:
        answered.wait(timeout_s)


def _read_http(connection: socket.socket, leave_after: int | None, deadline: float) -> Reply:
    """Read one answer to its end, or `leave_after` bytes of it."""
    connection.settimeout(max(0.1, deadline - time.monotonic()))
    response = http.client.HTTPResponse(connection, method="POST")
    try:
        response.begin()
        data = bytearray()
        while part := response.read1(65_536):
            data += part
            if leave_after is not None and len(data) >= leave_after:
                return Reply("left", "http", response.status)
            if time.monotonic() > deadline:
                return Reply("none", "http", response.status)
    finally:
        response.close()
    errors, other = readable(bytes(data))
    if response.status != 200 and not errors:
        errors = other
    heads = "\n".join(f"{name}: {value}" for name, value in response.getheaders())
    return Reply("answered", "http", response.status, errors, f"{other}\n{heads}")


def _openai_error(error: dict[str, Any]) -> str:
    return f"{error.get('type')}: {error.get('message', error)}"


def readable(data: bytes) -> tuple[str, str]:
    """The error texts in a body, and all else but the generated text. An event that was cut off in its midst is left out."""
    errors, other = [], []
    lines = data.decode("utf-8", "replace").splitlines() or [""]
    if lines[-1].startswith("data: {") and not data.endswith(b"\n"):
        lines.pop()
    for line in lines:
        try:
            answer = json.loads(line.removeprefix("data: "))
        except ValueError:
            other.append(line)
            continue
        if isinstance(answer, dict):
            for name in GENERATED:
                answer.pop(name, None)
            if answer.get("error"):
                error = answer.pop("error")
                errors.append(_openai_error(error) if isinstance(error, dict) else str(error))
        other.append(json.dumps(answer))
    return "\n".join(errors), "\n".join(other)
