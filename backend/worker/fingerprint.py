"""The content of a checkpoint's files as one hash, without reading gigabytes at every start.

The hash is of the content. A note of it is kept under what the file system said of the files when they were read: device, inode,
size, and the times of the last change of content and of status. While that is the same, so is the hash. The time of the last
change of status (ctime) is what makes this safe: a program can set a file's mtime to any value, as rsync, tar and cp -p do, but
writing or replacing a file changes its ctime, which no program can set. A file system's clock ticks in milliseconds, so there is
no note of files that changed within the last seconds. A checkpoint that was copied or touched is read again, and its weights are
found.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from kernels.cpu.trust import distrust_of_directory, make_private_directory, open_trusted

PIECE = 16 << 20
SETTLED_S = 5.0  # a change that is older has a ctime that no later change can have
NOTE = ".content"
MAX_NOTES = 200


def state_of(files: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """Numbers of each file that differ once it has changed. Raises OSError."""
    found = [os.stat(path) for path in files]
    return tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in found)


def content_hash(files: Sequence[Path], directories: Iterable[Path], clock: Callable[[], float] = time.time) -> str:
    """A hash over all of `files`. directories: where notes of earlier hashes lie, and new ones go. Raises OSError."""
    directories = list(directories)
    state = state_of(files)
    note = hashlib.sha256(repr(state).encode()).hexdigest()[:40] + NOTE
    if (known := _noted(note, directories)) is not None:
        return known
    found = _hash(files)
    changed_at = max(times[-1] for times in state) / 1e9
    if state == state_of(files) and clock() - changed_at > SETTLED_S:
        _write_note(note, found, directories)
    return found


def _hash(files: Sequence[Path]) -> str:
    """Hashes of all pieces, on torch's number of threads, hashed together."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for path in files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            for piece in pool.map(lambda at, path=path: _hash_of_piece(path, at), range(0, size, PIECE)):
                digest.update(piece)
    return digest.hexdigest()


def _hash_of_piece(path: Path, offset: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return hashlib.sha256(file.read(PIECE)).digest()


def _noted(name: str, directories: Iterable[Path]) -> str | None:
    for directory in directories:
        with suppress(OSError):  # there is none, or somebody else could have written it
            if distrust_of_directory(directory) is None:
                with open_trusted(directory / name) as file:
                    text = file.read(65).decode("ascii", "replace")
                if re.fullmatch("[0-9a-f]{64}", text):
                    return text
    return None


def _write_note(name: str, text: str, directories: Iterable[Path]) -> None:
    for directory in directories:
        with suppress(OSError):  # a directory that cannot be written: the files are read again at the next start
            make_private_directory(directory)
            if distrust_of_directory(directory) is None:
                unfinished = directory / f"{name}-{os.getpid()}"
                unfinished.write_text(text)
                unfinished.chmod(0o600)
                os.replace(unfinished, directory / name)
                _remove_old(directory)
                return


def _remove_old(directory: Path) -> None:
    notes = sorted(directory.glob("*" + NOTE), key=lambda path: path.lstat().st_mtime, reverse=True)
    for path in notes[MAX_NOTES:]:
        path.unlink(missing_ok=True)
