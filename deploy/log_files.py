"""The files of a server's log: NAME is being written, NAME.1 to NAME.9 are the ones before it, newest first.

A start begins a new file, so what a crash has said stays. A file that grows too long while the server runs is copied aside
and emptied: the server keeps it open in append mode, and so goes on at its new end. What it writes during the copy is lost.
Where there is no room for the copy, the content is dropped. No log is worth an end of the server: what goes wrong is returned
as a sentence.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

KEPT = 10  # log files, the one being written included
MAX_BYTES = 64 << 20
DISK_SHARE = 64  # A file takes at most a 64th of its file system, so those of two logs take about a third.
MIN_FREE_BYTES = 4096  # With less, no line fits any more.


def begin(path: Path) -> BinaryIO:
    """Put the former log aside and open a new one, in append mode, readable by this user only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        _make_room(path)
        path.rename(_numbered(path, 1))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600), "ab", buffering=0)


def append(path: Path, line: str) -> None:
    """Add a line of the launcher's own to the log that a server is writing. Does nothing where there is no log, or no room."""
    if path.is_file():
        with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
            file.write(f"everbatch: {line}\n".encode())


def where(path: Path) -> str:
    """The place of the log of a server that has to end, in words: the next start puts the log aside."""
    return f"the log is {path}, and {_numbered(path, 1).name} beside it once the server is started again"


def look_after(path: Path) -> str | None:
    """Put the content aside and empty the file once it is longer than limit_bytes(). Returns why the log cannot be written,
    None when it can. Never raises OSError.
    """
    try:
        if path.is_file() and path.stat().st_size > limit_bytes(path):
            _put_aside(path)
        if shutil.disk_usage(path.parent).free < MIN_FREE_BYTES:
            return f"no space is left for the log {path}; the server goes on without it"
    except OSError as error:
        return f"the log {path} cannot be kept ({error.strerror}); the server goes on without it"
    return None


def _put_aside(path: Path) -> None:
    _make_room(path)
    aside = _numbered(path, 1)
    try:
        shutil.copyfile(path, aside)
    except OSError:  # There is no room for both. The newer lines are worth more than the older ones.
        aside.unlink(missing_ok=True)
    os.truncate(path, 0)


def limit_bytes(path: Path) -> int:
    """How long the file may become where it lies."""
    return min(MAX_BYTES, shutil.disk_usage(path.parent).total // DISK_SHARE)


def _make_room(path: Path) -> None:
    """Shift the older files by one; the oldest is lost."""
    for number in range(KEPT - 2, 0, -1):
        if _numbered(path, number).exists():
            _numbered(path, number).replace(_numbered(path, number + 1))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
