"""Messages to and from a process that does jobs under limits (limited_server.py), and their frames.

A frame is a 4-byte little-endian length and that many bytes of msgpack, decoded by msgspec into exactly one of these types. The
first frame to the process is the task's own: what its jobs are made of.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator

import msgspec
from msgspec import Struct

READY = 0  # job number of the first outcome, which says that the process is ready
_LENGTH = struct.Struct("<I")


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one job."""

    cpu_s: float  # processor time
    num_bytes: int  # memory


class Begin(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Do a job. The answer is one Outcome, unless it is dropped before."""

    job: int
    task: bytes  # in the encoding of those who gave it and who do it


class Drop(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Cancel a job."""

    job: int


class Ending(enum.StrEnum):
    """The way in which a job ended."""

    DONE = "done"
    REFUSED = "refused"  # the job itself is invalid
    OVER_CPU = "over_cpu"  # it was killed at its limit of processor time
    OVER_MEMORY = "over_memory"
    FAILED = "failed"  # the code that does the job has failed
    DROPPED = "dropped"
    LOST = "lost"  # the process ended before the job


class Outcome(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of a job."""

    job: int
    ending: Ending
    result: bytes = b""  # if DONE
    num_bytes: int = 0  # if DONE: memory that the result holds, where that is measured
    notes: tuple[str, ...] = ()  # if DONE: what the result leaves out of what was asked
    text: str = ""  # if REFUSED: a sentence for the client; if FAILED: lines for the log, the last with the exception
    place: str = ""  # if REFUSED: the place in what was given


_encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Begin | Drop).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def frame(message: Struct) -> bytes:
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
