"""Framing of the messages between a client of the engine (a Triton stub) and the engine process.

One frame is a 4-byte little-endian length and that many bytes of msgpack; what a frame may hold is one of the tagged structs
of core/messages.py, decoded by msgspec into exactly that type. Nothing is ever executed or unpickled. The socket is AF_UNIX in
a 0700 directory, and the engine checks the peer's user id besides.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable

import msgspec
from msgspec import Struct

from backend.api.errors import InvalidRequest
from backend.api.request import RequestId
from backend.core.messages import Command, Message

# The largest request that the default limits let through takes about 22 MiB: 16 MiB of extra inputs, 5 bytes for each token of
# a prompt (5 MiB for a context of a million), 0.3 MiB of words and bias. A response is largest when it is not streamed and
# holds 20 alternatives of each position: 340 bytes a token, 43 MiB for 131,072 tokens.
MAX_FRAME_BYTES = 64 << 20
MAX_DROPPED_BYTES = 4 * MAX_FRAME_BYTES  # a larger frame ends the connection instead of being skipped
_LENGTH = struct.Struct("<I")


class _Addressed(Struct):
    """The part of a command that is read when the rest cannot be decoded."""

    request_id: RequestId


class FrameTooLarge(InvalidRequest):
    """A frame exceeds MAX_FRAME_BYTES. It was not sent, or was read and dropped."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(
            f"the request takes {num_bytes} bytes on its way to the engine, the limit is {MAX_FRAME_BYTES}; "
            f"shorten its prompt, words, bias or extra inputs"
        )
        self.num_bytes = num_bytes
        self.limit = MAX_FRAME_BYTES


_encoder = msgspec.msgpack.Encoder()
_decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
_decode_message: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode
_decode_addressed = msgspec.msgpack.Decoder(_Addressed).decode
# msgspec's own error, and those that pass through it: text that is not UTF-8, nesting that is too deep.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


LEAST_INTEGER, MOST_INTEGER = -(1 << 63), (1 << 64) - 1  # that msgpack has
_INTEGERS = f"integers of a request are {LEAST_INTEGER} to {MOST_INTEGER}; send one of these"


class Undecodable(Exception):
    """A complete frame holds none of the messages. The text is the library's, for the log."""


def encode_frame(value: Command | Message) -> bytes:
    """Raises InvalidRequest: FrameTooLarge beyond the cap, or for a value that msgpack does not have."""
    try:
        body = _encoder.encode(value)
    except (ValueError, OverflowError, TypeError):
        unknown = (
            "the request holds a value that is neither a number nor text, nor a list or an object of them; leave it out"
        )
        raise InvalidRequest(_unsendable(value) or unknown) from None
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(len(body))
    return _LENGTH.pack(len(body)) + body


def _unsendable(value: object, name: str = "the request") -> str:
    """A description of the value that msgpack cannot encode; empty if it is unknown."""
    fields: list[tuple[str, object]] = []
    if isinstance(value, Struct):
        fields = [(field, getattr(value, field)) for field in value.__struct_fields__]
    elif isinstance(value, dict):
        fields = [(name, part) for pair in value.items() for part in pair]
    elif isinstance(value, list | tuple):
        fields = [(name, part) for part in value]
    elif isinstance(value, int):
        return "" if LEAST_INTEGER <= value <= MOST_INTEGER else f"{name} is {_shown(value)}; {_INTEGERS}"
    else:
        lone = re.search("[\ud800-\udfff]", value) if isinstance(value, str) else None
        return f"{name} has a lone surrogate at character {lone.start()}, which is no text; remove it" if lone else ""
    return next((found for field, part in fields if (found := _unsendable(part, field))), "")


def _shown(number: int) -> str:
    """The number, or its length if it is too long to be shown."""
    return str(number) if number.bit_length() <= 256 else "an integer of more than 77 digits"


def decode_command(frame: bytes) -> Command:
    """Raises Undecodable."""
    try:
        return _decode_command(frame)
    except _UNREADABLE as error:
        raise Undecodable(str(error)) from None


def decode_message(frame: bytes) -> Message:
    """Raises Undecodable."""
    try:
        return _decode_message(frame)
    except _UNREADABLE as error:
        raise Undecodable(str(error)) from None


def request_id_of(frame: bytes) -> RequestId | None:
    """The request id of a command that cannot be decoded; None if the id cannot be read either."""
    try:
        return _decode_addressed(frame).request_id
    except _UNREADABLE:
        return None


def receive_frame(connection: socket.socket) -> bytes | None:
    """Return the next frame's body, None at the end of the stream.

    Raises FrameTooLarge for a frame beyond the limit, which is skipped: the next call returns the next frame. Raises
    ConnectionError if it is too large even to be skipped.
    """
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length <= MAX_FRAME_BYTES:
        return _receive_exactly(connection, length)
    if length > MAX_DROPPED_BYTES:
        raise ConnectionError(f"a frame of {length} bytes was announced, the limit is {MAX_FRAME_BYTES}")
    _drop(connection, length)
    raise FrameTooLarge(length)


def _drop(connection: socket.socket, length: int) -> None:
    """Read and discard so many bytes. Raises ConnectionError if the stream ends before."""
    while length:
        chunk = connection.recv(min(1 << 20, length))
        if not chunk:
            raise ConnectionError("the stream ended within a frame")
        length -= len(chunk)


def _receive_exactly(connection: socket.socket, length: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < length:
        chunk = connection.recv(min(1 << 20, length - len(chunks)))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)
