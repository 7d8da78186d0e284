"""A file of a multipart body (RFC 7578), line by line as it comes in: nothing holds it as a whole.

aiohttp's reader finds the parts; how long a line, how many parts and how large the body may be is bounded here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from gateway.batches.records import KEPT_S
from gateway.errors import GatewayError

if TYPE_CHECKING:
    from aiohttp import BodyPartReader

BLOCK = 1 << 16  # bytes of a part that are read at once
KEPT_AT_ONCE = 1 << 20  # bytes of lines that are kept in one transaction
MOST_PARTS = 16
LONGEST_HEAD = 8192  # bytes of a line of a part's head
LONGEST_VALUE = 1024  # bytes of a field that is no file
LEAST_KEPT_S = 3600
_NO_FORM = "the body is no form of type multipart/form-data with the fields purpose and file"
_EXPIRES = "expires_after[seconds]"
_ANCHOR = "expires_after[anchor]"
Keep = Callable[[list[bytes]], Awaitable[None]]


@dataclass
class Form:
    """The fields of POST /v1/files. The file's lines have gone to where they are kept."""

    filename: str | None = None
    purpose: str | None = None
    kept_s: int = KEPT_S

    def check(self) -> None:
        """Raises GatewayError where a field is missing."""
        if self.filename is None or self.purpose is None:
            name = "purpose" if self.purpose is None else "file"
            raise GatewayError(400, f"{name} is missing", name, "missing_required_parameter")

    def take(self, name: str, value: str) -> None:
        """Raises GatewayError for a field that there is not, and for a wrong value."""
        if name == "purpose":
            if value != "batch":
                raise GatewayError(400, f"purpose is {value[:40]!r}; it is batch", "purpose", "invalid_value")
            self.purpose = value
        elif name == _EXPIRES:
            number = int(value) if value.isascii() and value.isdigit() and len(value) < 9 else 0
            if not LEAST_KEPT_S <= number <= KEPT_S:
                text = f"{name} is {value[:40]!r}; it is a number from {LEAST_KEPT_S} to {KEPT_S}"
                raise GatewayError(400, text, name, "invalid_value")
            self.kept_s = number
        elif name != _ANCHOR or value != "created_at":
            text = f"unknown parameter {name[:40]!r}; leave it out"
            raise GatewayError(400, text, name[:40], "unknown_parameter", logged="")


class Incoming:
    """The bytes of a body, for aiohttp's reader. Raises GatewayError for too many, or where they do not come in time, and
    ConnectionResetError when the client leaves.
    """

    def __init__(self, receive: Receive, most_bytes: int, timeout_s: float) -> None:
        self._receive, self._most, self._timeout_s = receive, most_bytes, timeout_s
        self._held = bytearray()
        self._is_over = False
        self._count = 0

    async def read(self, size: int) -> bytes:
        if not self._held and not self._is_over:
            await self._more()
        return self._take(size)

    async def readline(self, *, max_line_length: int = LONGEST_HEAD) -> bytes:
        while (end := self._held.find(b"\n", 0, max_line_length)) < 0 and not self._is_over:
            if len(self._held) >= max_line_length:
                raise ValueError("a line of a head is too long")
            await self._more()
        return self._take(end + 1 if end >= 0 else len(self._held))

    def unread_data(self, data: bytes) -> None:
        self._held[:0] = data

    def at_eof(self) -> bool:
        return self._is_over and not self._held

    def _take(self, size: int) -> bytes:
        data = bytes(self._held[:size])
        del self._held[:size]
        return data

    async def _more(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                message = await self._receive()
        except TimeoutError:
            text = f"no more of the body came within {self._timeout_s:g} s"
            raise GatewayError(408, text, code="timeout") from None
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        data = message.get("body", b"")
        self._count += len(data)
        if self._count > self._most:
            raise too_large(self._most)
        self._held += data
        self._is_over = not message.get("more_body", False)


def too_large(most_bytes: int) -> GatewayError:
    text = f"the file has more than {most_bytes} bytes, the limit; make several of it"
    return GatewayError(413, text, "file", "file_too_large")


async def read_form(content_type: str, incoming: Incoming, longest_line: int, most_lines: int, keep: Keep) -> Form:
    """Read a body to its end. `keep`: takes the next lines of the file. Raises GatewayError."""
    from aiohttp import BodyPartReader, MultipartReader  # here, because few servers are sent files
    from aiohttp.http_exceptions import HttpProcessingError

    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise GatewayError(415, f"{_NO_FORM}; send one")
    form, has_file, count = Form(), False, 0
    try:
        reader = MultipartReader({"Content-Type": content_type}, incoming)  # type: ignore[arg-type]
        while (part := await reader.next()) is not None:
            count += 1
            if count > MOST_PARTS or not isinstance(part, BodyPartReader):
                raise ValueError("too many parts, or parts of parts")
            name = part.name or ""
            if name == "file" and not has_file:
                has_file, form.filename = True, _plain_name(part.filename)
                await _keep_lines(part, longest_line, most_lines, keep)
            else:
                form.take(name, await _value(part))
    except (HttpProcessingError, ValueError, AssertionError, LookupError, RuntimeError, EOFError):
        raise GatewayError(400, f"{_NO_FORM}; send one", code="invalid_multipart") from None
    form.check()
    return form


async def _value(part: BodyPartReader) -> str:
    data = b""
    while block := await part.read_chunk(BLOCK):
        data += block
        if len(data) > LONGEST_VALUE:
            raise ValueError("a field is too long")
    return data.decode()


async def _keep_lines(part: BodyPartReader, longest: int, most: int, keep: Keep) -> None:
    held: list[bytes] = []
    size = count = 0
    async for line in _lines(part, longest):
        held.append(line)
        size += len(line)
        count += 1
        if count > most:
            raise GatewayError(400, f"the file has more than {most} lines, the limit", "file", "file_too_large")
        if size >= KEPT_AT_ONCE:
            await keep(held)
            held, size = [], 0
    await keep(held)


async def _lines(part: BodyPartReader, longest: int) -> AsyncIterator[bytes]:
    """The lines of a part, each with its line break. Raises GatewayError for one that is too long."""
    rest, number = bytearray(), 0
    while block := await part.read_chunk(BLOCK):
        rest += block
        if b"\n" in block:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                number += 1
                _check_length(line, longest, number)
                yield bytes(line) + b"\n"
        _check_length(rest, longest, number + 1)
    if rest:
        yield bytes(rest)


def _check_length(line: Any, longest: int, number: int) -> None:
    if len(line) > longest:
        text = f"line {number} of the file has more than {longest} bytes, the limit of one request; send less in it"
        raise GatewayError(400, text, "file", "line_too_long")


def _plain_name(given: str | None) -> str:
    """A name to show: it is no path, and holds no control character."""
    name = re.split(r"[/\\]", given or "")[-1]
    return "".join(character if character.isprintable() else "?" for character in name)[:255] or "file.jsonl"
