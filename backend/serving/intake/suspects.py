"""Suspects: texts under whose reading a stub has died are not read again, however often they are sent.

    text thread   reading(digest)   notes the digest of a request in a file while its text is read
    next stub     Suspects(file)    refuses requests with the digests that the file still holds

A tokenizer that crashes takes the stub with it, and clients send again what was not answered: the OpenAI endpoint once by itself.
What is written to a file outlives its process, at the cost of two writes of DIGEST_BYTES for each request. Requests that were
being read beside the guilty one are refused too; all others go on when the server is back.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from backend.api.errors import InvalidRequest
from backend.serving.intake.batch import DIGEST_BYTES

_NOTHING = bytes(DIGEST_BYTES)


class Suspects:
    """Several threads may call it."""

    def __init__(self, file: Path | None) -> None:
        """`file`: of this model alone, in the directory that outlives its stub; None: nothing does, and nothing is noted."""
        held = file.read_bytes() if file is not None and file.exists() else b""
        digests = (held[start : start + DIGEST_BYTES] for start in range(0, len(held), DIGEST_BYTES))
        self._suspects = frozenset(digests) - {_NOTHING}
        self._fd = None if file is None else os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._places: set[int] = set()  # that are taken, in the file

    @contextlib.contextmanager
    def reading(self, digest: bytes) -> Iterator[None]:
        """Note that a text is being read. Raises InvalidRequest for one under which a stub has died."""
        if digest in self._suspects:
            raise InvalidRequest(
                "the server ended while it read this request, so it is not read again; change its text, or send it in parts"
            )
        with self._lock:
            place = next(place for place in range(len(self._places) + 1) if place not in self._places)
            self._places.add(place)
        try:
            self._note(place, digest)
            yield
        finally:
            self._note(place, _NOTHING)
            with self._lock:
                self._places.discard(place)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _note(self, place: int, digest: bytes) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # A full disk: the text is read all the same.
                os.pwrite(self._fd, digest, place * DIGEST_BYTES)
