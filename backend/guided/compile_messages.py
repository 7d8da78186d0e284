"""Messages between the engine and the process that compiles guides (compile_process.py), and their frames.

A frame is a 4-byte little-endian length and that many bytes of msgpack, decoded by msgspec into exactly one of these types.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from backend.api.guide import Guide
from backend.guided.materials import Materials

READY = 0  # job number of the first outcome, which says that the process is ready
_LENGTH = struct.Struct("<I")


class Setup(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The first message to the process."""

    materials: Materials
    cpu_s: float  # CPU time that compiling one guide may take
    num_bytes: int  # memory that compiling one guide may take


class Begin(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Compile a guide. The answer is one Outcome, unless it is dropped before."""

    job: int
    guide: Guide


class Drop(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Cancel a job."""

    job: int


class Ending(enum.StrEnum):
    """The way in which a job ended."""

    COMPILED = "compiled"
    REFUSED = "refused"  # the guide is invalid
    OVER_CPU = "over_cpu"  # it was killed at its limit of processor time
    OVER_MEMORY = "over_memory"
    FAILED = "failed"  # the library failed
    DROPPED = "dropped"
    LOST = "lost"  # the process ended before the job


class Outcome(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of a job."""

    job: int
    ending: Ending
    portable: bytes = b""  # if COMPILED: input of GuideBackend.load
    num_bytes: int = 0  # if COMPILED: memory that the guide holds
    text: str = ""  # if REFUSED: a sentence for the client; if FAILED: lines for the log, the last with the exception
    place: str = ""  # if REFUSED: the place in the guide's text


_encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Setup | Begin | Drop).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def frame(message: Setup | Begin | Drop | Outcome) -> bytes:
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits a stream of bytes into the bodies of its frames."""

    def __init__(self) -> None:
        self._held = bytearray()

    def add(self, data: bytes) -> None:
        self._held += data

    def __iter__(self) -> Iterator[bytes]:
        """Yield and remove the bodies of complete frames."""
        while len(self._held) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._held)[0]
            if len(self._held) < end:
                return
            body = bytes(self._held[_LENGTH.size : end])
            del self._held[:end]
            yield body
