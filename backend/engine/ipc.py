"""Typed messages between a client of the engine (a Triton stub) and the engine process, and their framing.

One frame is a 4-byte little-endian length and that many bytes of msgpack; what a frame may hold is one of the tagged structs
below, decoded by msgspec into exactly that type. Nothing is ever executed or unpickled. The socket is AF_UNIX in a 0700
directory, and the engine checks the peer's user id besides.
"""

from __future__ import annotations

import socket
import struct

import msgspec
from msgspec import Struct

from backend.api.config import EngineConfig
from backend.api.request import Request, RequestId, SessionId
from backend.api.response import Response
from backend.api.stats import EngineStats
from backend.core.step import ModelInfo

MAX_FRAME_BYTES = 256 << 20
CLIENT_SHIFT = 40  # request ids: client index << 40 | counter of that client
_LENGTH = struct.Struct("<I")


class Submit(Struct, frozen=True, tag="submit"):
    request_id: RequestId
    request: Request


class Cancel(Struct, frozen=True, tag="cancel"):
    request_id: RequestId
    keep_output_tokens: int | None = None


class StopSession(Struct, frozen=True, tag="stop_session"):
    request_id: RequestId
    session_id: SessionId
    end: bool = False


Command = Submit | Cancel | StopSession


class ClientGone(Struct, frozen=True):
    """What the server tells the loop when a connection has ended. No client can send it."""

    client_index: int


class Hello(Struct, frozen=True, tag="hello"):
    """First message of the engine on every connection."""

    client_index: int
    model: ModelInfo
    model_path: str  # directory that holds the tokenizer
    config: EngineConfig


class Responses(Struct, frozen=True, tag="responses"):
    """All responses of one step for this client, in order."""

    responses: list[Response]


class Stats(Struct, frozen=True, tag="stats"):
    stats: EngineStats


Message = Hello | Responses | Stats

_encoder = msgspec.msgpack.Encoder()
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_message = msgspec.msgpack.Decoder(Message).decode


def encode_frame(value: Command | Message) -> bytes:
    body = _encoder.encode(value)
    return _LENGTH.pack(len(body)) + body


def receive_frame(connection: socket.socket) -> bytes | None:
    """Return the next frame's body, None at the end of the stream. Raises ConnectionError for a frame beyond the cap."""
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes was announced, the limit is {MAX_FRAME_BYTES}")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, length: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < length:
        chunk = connection.recv(min(1 << 20, length - len(chunks)))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)
