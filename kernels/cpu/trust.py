"""Checks that no other user could have written a cache of compiled code.

Only this process's user and root are trusted. A directory or a file is not trusted if it belongs to anybody else, or if its group
or others may write it; nor is a link in a directory that others may write. A parent directory that others may write is trusted
only if it has the sticky bit, as /tmp has: without it, anybody could replace the directories in it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def distrust_of_directory(directory: Path) -> str | None:
    """Why a directory must not be used as a cache; None if it may. Raises OSError when it cannot be looked up."""
    for path in (directory, *directory.parents):
        if path.is_symlink() and _is_writable_by_others(path.parent):
            return f"{path} is a link in a directory that others may write"
    home = Path(os.path.realpath(directory))
    if reason := _distrust(home, home.stat(), stat.S_ISDIR):
        return reason
    for path in home.parents:
        found = path.stat()
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"everybody may write {path}, and so replace what is in it"
    return None


def open_trusted(path: Path) -> BinaryIO:
    """Open a file to read. Raises OSError for a link, for what is not a file, and for a file that others may have written."""
    file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 (the caller closes it)
    if reason := _distrust(path, os.fstat(file.fileno()), stat.S_ISREG):
        file.close()
        raise PermissionError(reason)
    return file


def make_private_directory(directory: Path) -> None:
    """Make a directory and its missing parents, accessible to this user alone. Existing directories stay as they are."""
    for path in reversed((directory, *directory.parents)):
        if not path.is_dir():
            path.mkdir(0o700, exist_ok=True)


def _distrust(path: Path, found: os.stat_result, is_kind: Callable[[int], bool]) -> str | None:
    if not is_kind(found.st_mode):
        return f"{path} is of another kind than it should be"
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {found.st_uid}, and this process is of user {os.geteuid()}"
    if found.st_mode & WRITABLE_BY_OTHERS:
        return f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):o}; chmod go-w mends it)"
    return None


def _is_writable_by_others(directory: Path) -> bool:
    return bool(directory.stat().st_mode & WRITABLE_BY_OTHERS)
