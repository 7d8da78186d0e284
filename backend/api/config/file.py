"""Reads the configuration: a JSON file and `section.key=value` overrides. Errors name the key and where it was given."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from backend.api.config.checks import check_config
from backend.api.config.schema import Decoupled, EngineConfig
from backend.api.errors import ConfigError, shown

MAX_FILE_BYTES = 1 << 20


def load_config(file: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> EngineConfig:
    """Read a JSON file (or nothing) and apply `section.key=value` overrides in order.

    Raises ConfigError naming the key and the file or override that it is from, for unknown keys, wrong types and values
    out of range.
    """
    tree: dict[str, Any] = {}
    origins = ConfigSources()
    if file is not None:
        tree = _read_tree(Path(file))
        origins.add_file(Path(file).name, tree)
    for override in overrides:
        origins.add_override(_apply_override(tree, override), override)
    try:
        return checked_config(tree)
    except ConfigError as error:
        raise ConfigError(f"{error}{origins.of(str(error))}") from None


def checked_config(tree: dict[str, Any]) -> EngineConfig:
    """The configuration of a tree of sections and keys. Raises ConfigError for whatever is wrong in it."""
    _check_keys(tree)
    try:
        config = msgspec.convert(tree, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_in_our_words(str(error), tree)) from None
    check_config(config)
    return config


def _check_keys(tree: dict[str, Any]) -> None:
    """Raise ConfigError for the first key that does not exist, with the nearest one that does."""
    sections = get_type_hints(EngineConfig)
    known = [f"{name}.{key}" for name, section in sections.items() for key in section.__struct_fields__]
    for name, values in tree.items():
        if name not in sections:
            raise _unknown_key(name, list(sections))
        for key in values if isinstance(values, dict) else ():
            if f"{name}.{key}" not in known:
                raise _unknown_key(f"{name}.{key}", known)


def _unknown_key(key: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/configuration.md lists the keys"
    return ConfigError(f"configuration: {key} is no known key; {hint}")


def _in_our_words(message: str, tree: dict[str, Any]) -> str:
    """msgspec's message with the key and its value in front, and with the choices where there are some."""
    problem, _, path = message.replace(" | null", "").partition(" - at `$.")
    key = path.rstrip("`")
    section, _, name = key.partition(".")
    hint = get_type_hints(get_type_hints(EngineConfig)[section]).get(name) if section and name else None
    allowed = ", ".join(_choices(hint))
    choices = f"; allowed are {allowed}" if allowed else ""
    value = tree.get(section, {}).get(name.partition("[")[0]) if name else tree.get(section)
    return f"configuration: {key} is {shown(json.dumps(value))}: {shown(problem.replace('`', ''))}{choices}"


def _choices(hint: Any) -> list[str]:
    """The values of a key that has a few; [] for any other."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return ["true", "false", *_choices(get_args(hint)[1])] if hint == Decoupled else []


def _read_tree(path: Path) -> dict[str, Any]:
    where = f"configuration file {path.name or path}"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)  # It may be a device that never ends.
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{where}: it has more than {MAX_FILE_BYTES} bytes, which is the limit; name a JSON file")
        tree = json.loads(content)
    except FileNotFoundError:
        raise ConfigError(f"{where}: File does not exist") from None
    except OSError as error:
        raise ConfigError(f"{where}: it cannot be read ({error.strerror}); name a JSON file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON at line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError):  # no UTF-8, a number of thousands of digits, or brackets in brackets
        raise ConfigError(f"{where}: it holds what no configuration needs; name a JSON file in UTF-8") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration file {path.name}: a JSON object is expected, got {type(tree).__name__}")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> str:
    """Set one leaf of `tree`, and return its key. A value that is not JSON is taken as a string: `model.dtype=bfloat16`
    needs no quotes.
    """
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) != 2:
        raise ConfigError(
            f"override {shown(override)!r}: write it as section.key=value, for example kv_cache.max_tokens=4096"
        )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or a number of thousands of digits, which no key takes
        value = text
    section = tree.setdefault(keys[0], {})
    if not isinstance(section, dict):
        raise ConfigError(f"override {shown(override)!r}: {keys[0]} is no section")
    section[keys[1]] = value
    return ".".join(keys)


class ConfigSources:
    """Where each setting comes from, so that an error about it can say which file or which --set is to be changed.

    A later place of a key replaces an earlier one.
    """

    def __init__(self) -> None:
        self._places: dict[str, str] = {}  # section.key, and section -> place

    def add_file(self, name: str, tree: Mapping[str, object]) -> None:
        """Everything in the `tree` of the file that is called `name`."""
        for section, values in tree.items():
            self._places[section] = name
            for key in values if isinstance(values, dict) else ():
                self._places[f"{section}.{key}"] = name

    def add_override(self, key: str, override: str) -> None:
        """One `--set`, as it was written."""
        self._places[key] = self._places[key.partition(".")[0]] = f"--set {shown(override)}"

    def of(self, message: str) -> str:
        """` (KEY is from PLACE, ...)` for the keys that the first clause of `message` names; empty where none was given."""
        clause = message.partition(";")[0]
        named = [key for key in self._places if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", clause)]
        named.sort(key=clause.index)
        text = ", ".join(f"{key} is from {self._places[key]}" for key in named)
        return f" ({text})" if text else ""
