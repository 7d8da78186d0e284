"""BlockFile: KV blocks in a file, which outlives the engine that wrote them.

One engine holds a file, by a lock that ends with its process. A directory has a file for each engine that runs at the same time:
`MODEL-0.blocks`, `MODEL-1.blocks`, ..., where MODEL is the fingerprint's beginning. Files of other models are removed, unless an
engine holds them.

    header   MAGIC | fingerprint | bytes of a place | places | checksum, filled up to HEADER_BYTES
    places   RecordFormat.place_bytes each (kept_block.py)

Writes go to the page cache, without waiting for the disk: after a loss of power some places are torn, which their checksums show.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from backend.api.errors import ConfigError
from backend.core.kept_block import Found, RecordFormat, checksum_of, digest_of

log = logging.getLogger("everbatch.engine")
KEY = "kv_cache.directory"
SUFFIX = ".blocks"
MAGIC = b"everbatch-level1"
HEADER_BYTES = 4096
MAX_ENGINES = 64  # files of one model in a directory
_HEADER = struct.Struct("<16s32sQQ")


def num_places(max_bytes: int, place_bytes: int) -> int:
    """The places of a file of at most `max_bytes`."""
    return max(0, max_bytes - HEADER_BYTES) // place_bytes


class BlockFile:
    """Implements core.kept_block.BlockStore."""

    def __init__(self, directory: str, max_bytes: int, fingerprint: str, form: RecordFormat) -> None:
        """`max_bytes`: of the file. Raises ConfigError for a directory that cannot be used, or one without room for a block."""
        self._form = form
        self.num_places = num_places(max_bytes, form.place_bytes)
        if not self.num_places:
            raise ConfigError(
                f"kv_cache.directory_bytes is {max_bytes}, and a file with one block takes {HEADER_BYTES + form.place_bytes}; "
                f"raise it"
            )
        path = own_directory(KEY, directory)
        own = digest_of(fingerprint)
        try:
            _remove_others(path, own.hex()[:16])
            self._descriptor = _open_free(path, own.hex()[:16])
            self.is_new = not self._has_header(own)
            if self.is_new:
                self._begin(own)
        except OSError as error:
            raise ConfigError(f"{KEY} is {directory}, where no file can be kept ({error.strerror})") from None

    def scan(self) -> Iterator[Found]:
        for place in range(0 if self.is_new else self.num_places):
            record = self._form.decode(os.pread(self._descriptor, self._form.num_bytes, self._offset(place)))
            if record is not None:
                yield Found(place, record)

    def read(self, place: int) -> bytes:
        return os.pread(self._descriptor, self._form.place_bytes, self._offset(place))

    def write(self, place: int, content: bytes) -> None:
        view, offset = memoryview(content), self._offset(place)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def close(self) -> None:
        os.close(self._descriptor)

    def _offset(self, place: int) -> int:
        return HEADER_BYTES + place * self._form.place_bytes

    def _header(self, own: bytes) -> bytes:
        body = _HEADER.pack(MAGIC, own, self._form.place_bytes, self.num_places)
        return (body + checksum_of(body)).ljust(HEADER_BYTES, b"\0")

    def _has_header(self, own: bytes) -> bool:
        """True if the file was begun by an engine with the same model, form and size."""
        size = HEADER_BYTES + self.num_places * self._form.place_bytes
        is_whole = os.fstat(self._descriptor).st_size == size
        return is_whole and os.pread(self._descriptor, HEADER_BYTES, 0) == self._header(own)

    def _begin(self, own: bytes) -> None:
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, HEADER_BYTES + self.num_places * self._form.place_bytes)
        os.pwrite(self._descriptor, self._header(own), 0)


def _open_free(directory: Path, name: str) -> int:
    """Open and lock the first file of this model that no engine holds. Raises OSError."""
    for number in range(MAX_ENGINES):
        descriptor = _locked(directory / f"{name}-{number}{SUFFIX}", os.O_CREAT)
        if descriptor is not None:
            return descriptor
    raise OSError(0, f"{MAX_ENGINES} engines of this model use it")


def _locked(path: Path, flags: int = 0) -> int | None:
    """A descriptor of the file, locked; None if an engine holds it, or it is no plain file of this user. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
        if is_ours and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return descriptor
    except BlockingIOError:
        pass  # another engine has locked it
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _remove_others(directory: Path, name: str) -> None:
    """Remove the files of other models that no engine holds."""
    for path in directory.glob("*" + SUFFIX):
        if path.name.startswith(name + "-"):
            continue
        with suppress(OSError):  # it is a link or has gone; it is not this engine's business
            descriptor = _locked(path)
            if descriptor is not None:
                path.unlink()
                os.close(descriptor)
                log.info("the second level of another model has been removed: %s", path.name)


def own_directory(key: str, directory: str) -> Path:
    """Make the directory where it is missing, for its user alone. `key`: of the configuration, for errors.

    Raises ConfigError if it belongs to another user, if others may write to it, or if it cannot be used.
    """
    path = Path(directory)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{key} is {directory}, which cannot be used ({error.strerror}); name another one") from None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{key} is {directory}, where others may write; name one of this user alone, and take the right to write from others "
            f"(chmod 700)"
        )
    return path
