"""Reads the files of a checkpoint directory, which may come from anywhere, in one place and with limits.

A file is read when it is a regular file of at most so many bytes. A link is followed to a file of the same directory, or, in
a hub's cache (.../snapshots/REVISION, or a folder in it, beside .../blobs), to a file of blobs; every other link is refused,
because a checkpoint from elsewhere could bring one to any file of this machine. JSON is UTF-8, an object, and nested MAX_DEPTH
levels at most.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from backend.api.errors import ConfigError

MAX_JSON_BYTES = 8 << 20  # parsed, JSON takes up to 24 times as much memory
MAX_DEPTH = 32
MAX_ID = 2**31 - 1  # greatest token id
MAX_SHOWN = 100  # characters of a name or a value in an error

REMEDY = "correct it, or fetch the checkpoint again"
_KINDS = {
    stat.S_ISDIR: "a directory",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}
T = TypeVar("T")


def find_file(directory: Path, name: str, most_bytes: int | None = None) -> Path | None:
    """The file `name` of a checkpoint; None when there is none. Raises ConfigError when it must not be read."""
    path = directory / name
    try:
        if not os.path.lexists(path):
            return None
        found = path.stat()
        _check_link(directory, path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        if path.is_symlink():
            raise ConfigError(f"{shown(name)} is a link that leads nowhere; put the file itself there") from None
        raise _unreadable(name, error) from None
    if not stat.S_ISREG(found.st_mode):
        kind = next((words for is_kind, words in _KINDS.items() if is_kind(found.st_mode)), "something else")
        raise ConfigError(f"{shown(name)} is {kind}, a file is needed; put the file itself there")
    if most_bytes is not None and found.st_size > most_bytes:
        raise ConfigError(f"{shown(name)} has {found.st_size} bytes, at most {most_bytes} are read; fetch it again")
    return path


def read_bytes(directory: Path, name: str, most_bytes: int) -> bytes | None:
    """The content of a file of a checkpoint; None when there is none. Raises ConfigError."""
    path = find_file(directory, name, most_bytes)
    if path is None:
        return None
    try:
        # O_NONBLOCK, because the path may have become a pipe since it was checked.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise _unreadable(name, error) from None
    if len(content) > most_bytes:  # a file of /proc or one that grows
        raise ConfigError(f"{shown(name)} has more than {most_bytes} bytes, which is the limit; fetch it again")
    if not content.strip():
        raise ConfigError(f"{shown(name)} is empty; fetch it again")
    return content


def read_text(directory: Path, name: str, most_bytes: int) -> str | None:
    """Like `read_bytes`, of UTF-8."""
    content = read_bytes(directory, name, most_bytes)
    return None if content is None else decoded(content, name)


def read_object(directory: Path, name: str) -> dict[str, Any] | None:
    """The object in a JSON file of a checkpoint; None when there is no such file. Raises ConfigError."""
    text = read_text(directory, name, MAX_JSON_BYTES)
    return None if text is None else parse_object(text, name)


def decoded(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 at byte {error.start}; fetch it again, or save it as UTF-8") from None


def parse_object(text: str, name: str) -> dict[str, Any]:
    """The object in `text`, the content of the file `name`. Raises ConfigError."""
    too_deep = ConfigError(f"{name} is nested deeper than {MAX_DEPTH} levels, which is the limit; fetch it again")
    if len(text) > MAX_JSON_BYTES:
        raise ConfigError(f"{name} has {len(text)} characters, at most {MAX_JSON_BYTES} are read; fetch it again")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON at line {error.lineno}, column {error.colno}; fetch it again") from None
    except RecursionError:
        raise too_deep from None
    except ValueError:  # Python converts no integer of more than 4,300 digits
        raise ConfigError(f"{name} has a number of more than 4300 digits; {REMEDY}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{name} holds a {type(content).__name__}, a JSON object is expected; fetch it again")
    if _is_deeper(content, MAX_DEPTH):
        raise too_deep
    return content


def convert(raw: object, kind: type[T], name: str, key: str = "") -> T:
    """`raw`, found under `key` of the file `name`, as a msgspec type. Raises ConfigError naming what does not fit."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {_explained(str(error), raw, key)}; {REMEDY}") from None


def token_ids(raw: dict[str, Any], key: str, name: str) -> tuple[int, ...]:
    """A key that is absent, one id, or a list. Raises ConfigError."""
    value = raw.get(key)
    given = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in given:
        if type(token_id) is not int or not 0 <= token_id <= MAX_ID:
            raise ConfigError(
                f"{name}: {key} is {quoted(value)}, an int from 0 to {MAX_ID} or a list is needed; {REMEDY}"
            )
    return tuple(given)


def shown(value: object) -> str:
    """A name or a value of a checkpoint as an error may show it: on one line, and not too long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = value if isinstance(value, str) and value.isprintable() else _REPR.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def quoted(value: object) -> str:
    """A text in quotes, that '1' is not taken for 1."""
    return _REPR.repr(value)[:MAX_SHOWN] if isinstance(value, str) else shown(value)


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxstring, self.maxlong = 3, 4, 4, MAX_SHOWN, 40


_REPR = _Repr()


def _check_link(directory: Path, path: Path) -> None:
    """Raises ConfigError for a link that leaves the checkpoint."""
    home, target = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    blobs = [each.parents[1] / "blobs" for each in (home, home.parent) if each.parent.name == "snapshots"]
    if not any(target.is_relative_to(place) for place in (home, *blobs)):
        raise ConfigError(f"{shown(path.name)} is a link out of the model's directory; put the file itself there")


def _unreadable(name: str, error: OSError | ValueError) -> ConfigError:
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "its name is none of a file"
    return ConfigError(f"{shown(name)} cannot be read ({reason}); let this user read it, or fetch it again")


def _is_deeper(content: object, most: int) -> bool:
    level: list[Any] = [content]
    for _ in range(most):
        containers = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for each in containers for child in each if isinstance(child, dict | list)]
        if not level:
            return False
    return True


# msgspec's messages: "Expected `int` >= 1, got `str` - at `$.a[0].b`", "Object missing required field `a` - at `$.b`"
_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$(?P<where>.*)`)?", re.DOTALL)
_TYPES = {"object": "an object", "array": "a list", "str": "a text"}


def _explained(message: str, raw: object, key: str) -> str:
    """msgspec's message as a clause with the key and the value."""
    parts = _MESSAGE.fullmatch(message)
    assert parts is not None  # the pattern fits every text
    what, where = parts["what"], parts["where"] or ""
    place = f"{key}{where}".lstrip(".")
    if missing := re.search(r"missing required field `(.*)`", what):
        return f"it lacks the key {f'{place}.{missing[1]}'.lstrip('.')}"
    value = _value_at(raw, where)
    is_value = f"is {quoted(value)}" if value is not _UNKNOWN else "holds a value"
    wanted = re.search(r"Expected `(.*?)`(.*?)(?:, got .*)?$", what)
    if wanted is None:
        return f"{place} {is_value}, which is out of range"
    kinds = " or ".join(_TYPES.get(kind, kind) for kind in wanted[1].split(" | "))
    return f"{place} {is_value}, {kinds}{wanted[2]} is needed"


_UNKNOWN = object()


def _value_at(raw: Any, where: str) -> object:
    """The value that msgspec means by `where`: .key, [0], or [...] for any value of an object."""
    for key, index in re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", where):
        try:
            raw = raw[int(index)] if index.isdigit() else raw[key] if key else _UNKNOWN
        except (KeyError, IndexError, TypeError):
            return _UNKNOWN
        if raw is _UNKNOWN:
            return raw
    return raw
