"""The files of a SessionLog: memory that the supervisor holds, or a directory (`sessions.directory`) that outlives the server."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from backend.api.errors import ConfigError
from backend.storage.block_file import own_directory

KEY = "sessions.directory"
NAMES = ("sessions-0.log", "sessions-1.log")


def in_memory() -> tuple[int, int]:
    """Descriptors of two files without names, which go with the last process that has them."""
    first, second = (os.memfd_create(name) for name in NAMES)
    return first, second


def in_directory(directory: str) -> tuple[int, int]:
    """Open or make the files of a directory of this user. Raises ConfigError for an unsafe one, or one in use."""
    path = own_directory(KEY, directory)
    try:
        first, second = (_opened(path / name) for name in NAMES)
    except OSError as error:
        raise ConfigError(f"{KEY} is {directory}, which cannot be used ({error.strerror}); name another one") from None
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(first)
        os.close(second)
        raise ConfigError(f"{KEY} is {directory}, which another engine uses; give each engine its own") from None
    return first, second


def _opened(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ConfigError(f"{KEY}: {path.name} is no file; remove it")
    return file
