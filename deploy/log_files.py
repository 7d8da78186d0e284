"""The files of a server's log: NAME is being written, NAME.1 to NAME.9 are the ones before it, newest first.

A start begins a new file, so what a crash has said stays. A file that grows too long while the server runs is copied aside
and emptied: the server keeps it open in append mode, and so goes on at its new end. What it writes during the copy is lost.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

KEPT = 10  # files, of which one is being written
MAX_BYTES = 64 << 20
DISK_SHARE = 32  # A file takes at most a 32nd of its file system, so all of them take less than a third.


def begin(path: Path) -> BinaryIO:
    """Put the former log aside and open a new one, in append mode, readable by this user only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        _make_room(path)
        path.rename(_numbered(path, 1))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600), "ab", buffering=0)


def append(path: Path, line: str) -> None:
    """Add a line of the launcher's own to the log that a server is writing. Does nothing where there is no log."""
    if path.is_file():
        with path.open("ab", buffering=0) as file:
            file.write(f"everbatch: {line}\n".encode())


def where(path: Path) -> str:
    """The place of the log of a server that has to end, in words: the next start puts the log aside."""
    return f"the log is {path}, and {_numbered(path, 1).name} beside it once the server is started again"


def cut_if_long(path: Path) -> None:
    """Put the content aside and empty the file once it is longer than limit_bytes()."""
    if path.is_file() and path.stat().st_size > limit_bytes(path):
        _make_room(path)
        shutil.copyfile(path, _numbered(path, 1))
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
