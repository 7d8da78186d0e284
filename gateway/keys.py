"""API keys: a file of `NAME KEY` lines, and the namespace of each name."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from pathlib import Path

SHORTEST_KEY = 16
LARGEST_FILE = 1 << 20
_log = logging.getLogger("everbatch.gateway")


class KeysError(Exception):
    """The file of keys cannot be used; the text says why and what to do, and holds no key."""


def namespace_of(name: str) -> str:
    """The `cache_salt` of a client: apart from every other name's, and no name itself."""
    return hashlib.sha256(b"everbatch gateway\0" + name.encode()).hexdigest()[:32]


def read_keys(path: Path) -> dict[bytes, str]:
    """SHA-256 of each key -> the name it belongs to. A name may have several keys. Raises KeysError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            _check(os.fstat(file.fileno()))
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise KeysError(f"the file of API keys cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_FILE:
        raise KeysError(f"the file of API keys has more than {LARGEST_FILE} bytes")
    return _parsed(content)


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeysError("the file of API keys is not a regular file")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise KeysError(f"the file of API keys has mode {mode:04o}, others may use it; chmod 600 mends that")
    if status.st_uid not in (0, os.geteuid()):
        raise KeysError("the file of API keys belongs to another user; chown mends that")


def _parsed(content: bytes) -> dict[bytes, str]:
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise KeysError("the file of API keys is not UTF-8 text") from None
    keys: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = line.split()
        if len(parts) != 2:
            raise KeysError(f"line {number} of the file of API keys is not NAME KEY")
        name, key = parts
        if len(key) < SHORTEST_KEY or not key.isascii():
            raise KeysError(f"the key in line {number} is not {SHORTEST_KEY} or more ASCII characters")
        digest = hashlib.sha256(key.encode()).digest()
        if keys.setdefault(digest, name) != name:
            raise KeysError(f"the key in line {number} belongs to another name already")
    if not keys:
        raise KeysError("the file of API keys holds no key; a line is NAME KEY")
    return keys


class Keys:
    """Who is who. The file is looked at for each request, and read again when it has changed.

    A changed file that cannot be used is told once in the log, and the keys before the change stay.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = _signature(path)
        self._keys = read_keys(path)

    def name_of(self, key: str) -> str | None:
        """The name a key belongs to. Compares with every key, in the same time whether or not one fits."""
        self._refresh()
        digest = hashlib.sha256(key.encode()).digest()
        found: str | None = None
        for known, name in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _refresh(self) -> None:
        signature = _signature(self._path)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._keys = read_keys(self._path)
        except KeysError as error:
            _log.error("%s; the keys read before stay in force", error)
        else:
            _log.info("API keys read again: %d", len(self._keys))


def _signature(path: Path) -> tuple[int, ...] | None:
    """Changes when the file does; None when there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
