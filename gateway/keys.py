"""API keys: a file of lines `NAME KEY [metrics] [adapters] [admin] [models=NAME,...]`, and the namespace of each name.

`metrics`: the key may read the page /metrics, which shows all clients. `adapters`: the key may load and unload LoRA adapters.
`admin`: the key may load, unload and replace models.
`models=`: the only models and LoRA adapters that the key may use.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SHORTEST_KEY = 16
LARGEST_FILE = 1 << 20
FORM = "NAME KEY [metrics] [adapters] [admin] [models=NAME,...]"
_RIGHTS = ("metrics", "adapters", "admin")
_MODELS = "models="
_log = logging.getLogger("everbatch.gateway")


class KeysError(Exception):
    """The file of keys cannot be used; the text says why and what to do, and holds no key."""


def namespace_of(name: str) -> str:
    """The `cache_salt` of a client: apart from every other name's, and no name itself."""
    return hashlib.sha256(b"everbatch gateway\0" + name.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Client:
    """The client that a key belongs to, and its rights."""

    name: str
    models: frozenset[str] | None = None  # None: all that are served
    metrics: bool = False
    adapters: bool = False  # may load and unload LoRA adapters
    admin: bool = False  # may load, unload and replace models

    @property
    def namespace(self) -> str:
        """Empty for every client of a server that asks for no keys."""
        return namespace_of(self.name) if self.name else ""

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


class Right(NamedTuple):
    """A right of keys whose line has the word. Without keys it is a right of local programs, or of everybody."""

    word: str
    forbidden: str  # the sentence "this key may not ..."
    without_keys: str  # the sentence "... from this machine only"; empty: everybody may

    def is_of(self, client: Client) -> bool:
        return {"metrics": client.metrics, "adapters": client.adapters, "admin": client.admin}[self.word]


READ_METRICS = Right("metrics", "read metrics and loads", "")
CHANGE_ADAPTERS = Right("adapters", "change adapters", "adapters can be changed")
OPERATE_MODELS = Right("admin", "operate models", "models can be operated")
EVERYBODY = Client("", metrics=True)
THIS_MACHINE = namespace_of(
    ""
)  # namespace of requests without a key that only local programs can send; no key has this name


def read_keys(path: Path, served: Collection[str] | None = None) -> dict[bytes, Client]:
    """SHA-256 of each key -> the client it belongs to. A name may have several keys.

    `served`: the names of models and adapters that there are; None: not known. Raises KeysError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            _check(os.fstat(file.fileno()))
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise KeysError(f"the file of API keys cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_FILE:
        raise KeysError(f"the file of API keys has more than {LARGEST_FILE} bytes")
    return _parsed(content, served)


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeysError("the file of API keys is not a regular file")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise KeysError(f"the file of API keys has mode {mode:04o}, others may use it; chmod 600 mends that")
    if status.st_uid not in (0, os.geteuid()):
        raise KeysError("the file of API keys belongs to another user; chown mends that")


def _parsed(content: bytes, served: Collection[str] | None) -> dict[bytes, Client]:
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise KeysError("the file of API keys is not UTF-8 text") from None
    keys: dict[bytes, Client] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, client = _of_line(line.split(), number)
        if served is not None and (unknown := sorted((client.models or set()) - set(served))):
            there_are = ", ".join(served)
            raise KeysError(f"line {number} of the file of API keys names model {unknown[0]!r}, there are {there_are}")
        before = keys.setdefault(hashlib.sha256(key.encode()).digest(), client)
        if before.name != client.name:
            raise KeysError(f"the key in line {number} belongs to another name already")
        if before != client:
            raise KeysError(f"the key in line {number} stands in an earlier line with other options; leave one out")
    if not keys:
        raise KeysError("the file of API keys holds no key; a line is NAME KEY")
    return keys


def _of_line(words: list[str], number: int) -> tuple[str, Client]:
    """A key, and whose it is."""
    if len(words) < 2:
        raise KeysError(f"line {number} of the file of API keys is not {FORM}")
    name, key, *options = words
    if len(key) < SHORTEST_KEY or not key.isascii():
        raise KeysError(f"the key in line {number} is not {SHORTEST_KEY} or more ASCII characters")
    lists = [option.removeprefix(_MODELS) for option in options if option.startswith(_MODELS)]
    rights = [option for option in options if option in _RIGHTS]
    if len(lists) > 1 or len(lists) + len(set(rights)) != len(options):
        raise KeysError(f"line {number} of the file of API keys is not {FORM}")
    models = frozenset(filter(None, lists[0].split(","))) if lists else None
    return key, Client(name, models, "metrics" in rights, "adapters" in rights, "admin" in rights)


class Keys:
    """The keys of a file. For each request the file's signature is compared, and the file is read again after a change. If it
    is invalid then, one line of the log says so, and the former keys stay.
    """

    def __init__(self, path: Path, served: Collection[str] | None = None) -> None:
        self._path, self._served = path, served
        self._seen = _signature(path)
        self._keys = read_keys(path, served)

    def client_of(self, key: str) -> Client | None:
        """The client that a key belongs to; None: no client. Takes the same time whether or not a key matches."""
        self._refresh()
        digest = hashlib.sha256(key.encode()).digest()
        found: Client | None = None
        for known, client in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = client
        return found

    def client_named(self, name: str) -> Client | None:
        """A client that has at least one key."""
        self._refresh()
        return next((client for client in self._keys.values() if client.name == name), None)

    def _refresh(self) -> None:
        signature = _signature(self._path)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._keys = read_keys(self._path, self._served)
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
