"""KvStore: KV that waits in a directory of this machine, in memory (/dev/shm) as a rule, for the engine that goes on with it.

A file has a name of 128 random bits, belongs to the user of the engines, and is read once: the engine that takes it removes it.
Other files go after a time, or when their room is needed, the oldest first, and so do those of an engine that was killed.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from backend.storage.block_file import own_directory

log = logging.getLogger("everbatch.engine")
SUFFIX = ".kv"
_NAME = re.compile(r"[0-9a-f]{32}")
KEY = "kv_transfer.directory"


class KvStore:
    def __init__(self, directory: str, max_bytes: int, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        """`max_bytes`: of all files together; `ttl_s`: seconds that each is kept. Raises ConfigError for an unsafe directory."""
        self._directory = own_directory(KEY, directory)
        self.max_bytes, self._ttl_s, self._now = max_bytes, ttl_s, now
        self._sweep(0)

    def put(self, data: bytes) -> str | None:
        """Keep `data`, and return its name; None if it does not fit or the directory is full."""
        if len(data) > self.max_bytes:
            return None
        self._sweep(len(data))
        name = secrets.token_hex(16)
        path = self._directory / (name + SUFFIX)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(data)
        except OSError as error:
            log.warning("KV for another engine is not kept (%s); that one will compute it again", error.strerror)
            path.unlink(missing_ok=True)
            return None
        return name

    def take(self, name: str, num_bytes: int) -> bytes | None:
        """Return what `put` has kept, and remove it. None if it has gone, or is no file of `num_bytes` of this user."""
        if not _NAME.fullmatch(name):
            return None
        path = self._directory / (name + SUFFIX)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                data = file.read(num_bytes) if is_ours and status.st_size == num_bytes else None
            path.unlink(missing_ok=True)
        except OSError:  # it was never there, or has gone
            return None
        return data

    def _sweep(self, room: int) -> None:
        """Remove what is too old, and the oldest beyond the limit less `room` bytes."""
        left = self.max_bytes - room
        for modified, size, path in sorted(self._files(), reverse=True):
            left -= size
            if left < 0 or modified < self._now() - self._ttl_s:
                with suppress(OSError):  # another engine has removed it
                    path.unlink()

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self._directory.glob("*" + SUFFIX):
            with suppress(OSError):  # another engine has removed it
                status = path.lstat()
                found.append((status.st_mtime, status.st_size, path))
        return found
