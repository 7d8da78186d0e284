"""WeightCache: the packed weights of models that were loaded before, in files that the next engine maps.

An entry is found by a hash of everything that its bits depend on: the content of the checkpoint's files (fingerprint.py), the
model's description, the format, the compiled kernels with their instruction set, and the Python that rounds and packs. A file is
written under another name, synchronised and renamed, so an entry is whole whenever it is seen: engines that start at once all
pack, and write the same. What somebody else could have written is not read (kernels/cpu/trust.py). Nothing here fails a start:
whatever is wrong is said in one line, and the model is packed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

import torch

from backend.api.config.schema import ModelConfigSection
from backend.worker import weight_file
from backend.worker.weight_file import Content, DamagedWeights
from kernels.cpu.build import cache_directories
from kernels.cpu.trust import distrust_of_directory, make_private_directory, open_trusted

log = logging.getLogger("everbatch.worker")
FORMAT = 1  # to be counted up when the meaning of an entry changes otherwise than by the code in _CODE
ENTRY, UNFINISHED = ".weights", ".part"
_ROOT = Path(__file__).resolve().parents[2]
# The code that decides how weights are rounded, packed and named.
_CODE = ("backend/architectures", "backend/layers", "backend/models", "backend/quant", "backend/worker", "kernels")


class WeightCache:
    def __init__(self, directories: Iterable[Path], max_bytes: int) -> None:
        """directories: the first choice first; they need not exist. max_bytes: of all entries in one of them; 0 = no cache."""
        self.directories = tuple(directories)
        self._max_bytes = max_bytes

    @classmethod
    def of(cls, section: ModelConfigSection) -> WeightCache:
        chosen = [Path(section.cache_dir).expanduser().absolute()] if section.cache_dir else None
        directories = chosen or [directory / "weights" for directory in cache_directories()]
        return cls(directories, int(section.cache_max_gb * 1e9))

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def find(self, key: str) -> Content | None:
        """The entry, mapped; None: there is none that may be used."""
        for directory in self.directories:
            path = directory / (key + ENTRY)
            try:
                if _is_usable(directory):
                    with open_trusted(path) as file:
                        content = weight_file.read(file, key)
                    with suppress(OSError):  # a directory that this user may only read
                        os.utime(path, follow_symlinks=False)
                    return content
            except FileNotFoundError:
                continue
            except (OSError, DamagedWeights) as error:
                log.warning("the kept weights %s are not used, and are made anew: %s", path, error)
        return None

    def keep(self, key: str, content: Content) -> None:
        """Write the entry into the first directory that takes it, and remove the oldest ones beyond the limit."""
        size = content.num_bytes
        problem: object = f"the model takes {size / 1e9:.1f} GB, model.cache_max_gb is {self._max_bytes / 1e9:.1f}"
        for directory in self.directories if size <= self._max_bytes else ():
            try:
                make_private_directory(directory)
                if problem := distrust_of_directory(directory) or _lack_of_room(directory, size):
                    continue
                self._write(directory, key, content)
                self._trim(directory, directory / (key + ENTRY))
                return
            except OSError as error:
                problem = error
        log.warning("the packed weights are not kept for the next start: %s", problem)

    def _write(self, directory: Path, key: str, content: Content) -> None:
        with _replacing(directory / (key + ENTRY)) as file:
            weight_file.write(file, key, content)

    def _trim(self, directory: Path, newest: Path) -> None:
        """Remove the entries that were used longest ago, and what engines that died have left."""
        for path in directory.glob("*" + UNFINISHED):
            _remove_unless_being_written(path)
        left = self._max_bytes - newest.stat().st_size
        for path in sorted(set(directory.glob("*" + ENTRY)) - {newest}, key=_used_at, reverse=True):
            with suppress(FileNotFoundError):  # another engine has removed it
                left -= path.lstat().st_size
                if left < 0:
                    path.unlink()


def key_of(*parts: object) -> str:
    """The key of an entry whose bits depend on `parts`, by their repr, and on the code."""
    return hashlib.sha256(repr((FORMAT, code_version(), torch.__version__, *parts)).encode()).hexdigest()[:40]


@cache
def code_version() -> str:
    """A hash of the Python files that decide what packed weights are."""
    digest = hashlib.sha256()
    for path in sorted(path for room in _CODE for path in (_ROOT / room).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_ROOT)} {len(content)} ".encode() + content)
    return digest.hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when all of it is on the disk, and is removed if that fails."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.stem + "-", suffix=UNFINISHED)
    try:
        with open(descriptor, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # held for as long as it is being written
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def _remove_unless_being_written(path: Path) -> None:
    with suppress(OSError), open_trusted(path) as file:  # it has been renamed or removed, or is locked
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _used_at(path: Path) -> float:
    with suppress(FileNotFoundError):  # another engine has removed it
        return path.lstat().st_mtime
    return 0.0


def _lack_of_room(directory: Path, size: int) -> str | None:
    """Why an entry of `size` bytes would leave too little of the disk; None if it does not."""
    free = shutil.disk_usage(directory).free
    if size <= free / 2:
        return None
    return f"it would take {size / 1e9:.1f} GB of the {free / 1e9:.1f} GB that are free in {directory}, at most half are taken"


def _is_usable(directory: Path) -> bool:
    """True if the directory is there and no other user could have written it."""
    if not directory.is_dir():
        return False
    reason = distrust_of_directory(directory)
    if reason is not None:
        log.warning("the kept weights in %s are not used: %s", directory, reason)
    return reason is None
