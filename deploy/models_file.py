"""models.json: which models one server has (docs/several-models.md). Read and checked here, and nowhere else."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from backend.api.checkpoint.model_files import shown
from deploy.errors import UserError

MAX_BYTES = 1 << 20
MAX_MODELS = 32
RESERVED = "everbatch"  # clients know the default model by it
LONGEST_S = 1e7
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?")
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)%")
GIB = 1 << 30


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of the file."""

    path: str  # checkpoint directory, GGUF file or hub id
    memory: float | str | None = (
        None  # for weights and KV pool: GiB, or "30%" of the free memory; unset: an equal share
    )
    threads: int | None = None  # threads of its engine; unset: an equal share of the cores
    set: tuple[str, ...] = ()  # SECTION.KEY=VALUE, as for --set, and after it
    names: tuple[str, ...] = ()  # further names that clients of the OpenAI endpoint may send
    lora: tuple[str, ...] = ()  # NAME=DIRECTORY, as for --lora
    chat_template: str = ""  # file of a Jinja template, in place of the model's own
    idle_unload_s: float | None = None  # an engine without requests for so long is unloaded; unset: never
    load_timeout_s: float = 600.0  # for a load while the server runs; requests for an idle model wait so long
    drain_timeout_s: float = 600.0  # requests of an engine that is replaced may run on for so long


class _File(msgspec.Struct, frozen=True):
    models: dict[str, Any]
    default: str = ""


class Models(msgspec.Struct, frozen=True):
    """The models by their names; the first is the default one, whose Triton models have the plain names."""

    entries: dict[str, Entry]
    file: Path | None = None  # where they are from; None: the command line

    def again(self) -> Models:
        """As the file says now. Raises UserError."""
        return self if self.file is None else read_models(self.file)


def named_on_the_command_line(given: Sequence[str]) -> Models | None:
    """The models of several `--model NAME=DIRECTORY`; None for one model without a name. Raises UserError."""
    if not given or (len(given) == 1 and not _is_named(given[0])):
        return None
    for each in given:
        if not _is_named(each):
            raise UserError(
                f"--model {shown(each)}: several models need names; write --model NAME=DIRECTORY for each of them"
            )
    pairs = [each.partition("=")[::2] for each in given]
    for index, (name, _) in enumerate(pairs):
        if name in [other for other, _ in pairs[:index]]:
            raise UserError(f"--model {shown(name)}=... is given twice; choose another name for one of them")
    entries = {name: Entry(path=path) for name, path in pairs}
    for name, entry in entries.items():
        _check(f"--model {name}", name, entry)
    return _counted("--model", entries, None)


def _is_named(text: str) -> bool:
    """True for NAME=DIRECTORY. A path that exists is a path, whatever is in it."""
    name, equals, path = text.partition("=")
    try:
        return bool(equals and path) and _NAME.fullmatch(name) is not None and not Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # no path can be so: resolve_model says why
        return False


def read_models(path: Path) -> Models:
    """Raises UserError that names the file, the model, the key, the value and the remedy."""
    where = f"--models {path.name or path}"
    tree = _read(path, where)
    for key in tree:
        if key not in _File.__struct_fields__:
            raise UserError(f"{where}: {_unknown(key, _File.__struct_fields__)}")
    try:
        file = msgspec.convert(tree, _File)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}; it is {{'models': {{NAME: {{'path': ...}}}}}}") from None
    entries = {name: _entry(where, name, value) for name, value in file.models.items()}
    if file.default and file.default not in entries:
        raise UserError(f"{where}: default is {shown(file.default)!r}, {_nearest(file.default, list(entries))}")
    if file.default:
        entries = {file.default: entries[file.default]} | entries
    return _counted(where, entries, path)


def _read(path: Path, where: str) -> dict[str, Any]:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        for index, (key, _) in enumerate(found):
            if key in [other for other, _ in found[:index]]:
                raise UserError(f"{where}: {shown(key)!r} is there twice; leave one out")
        return dict(found)

    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)  # It may be a device that never ends.
        if len(content) > MAX_BYTES:
            raise UserError(f"{where}: it has more than {MAX_BYTES} bytes, which is the limit; name a JSON file")
        tree = json.loads(content, object_pairs_hook=pairs)
        json.dumps(tree, ensure_ascii=False).encode()  # which half of a character, written as an escape, cannot be
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise UserError(f"{where}: it cannot be read ({error.strerror}); name a JSON file") from None
        raise UserError(f"{where}: it is not JSON in UTF-8; docs/several-models.md shows one") from None
    except RecursionError:
        raise UserError(f"{where}: it is nested too deeply; docs/several-models.md shows one") from None
    if not isinstance(tree, dict):
        raise UserError(f"{where}: a JSON object is expected; docs/several-models.md shows one")
    return tree


def _entry(where: str, name: str, value: Any) -> Entry:
    what = f"{where}: model {shown(name)}"
    for key in value if isinstance(value, dict) else ():
        if key not in Entry.__struct_fields__:
            raise UserError(f"{what}: {_unknown(key, Entry.__struct_fields__)}")
    try:
        entry = msgspec.convert(value, Entry)
    except msgspec.ValidationError as error:
        raise UserError(f"{what}: {str(error).replace('`', '')}; docs/several-models.md lists the keys") from None
    _check(what, name, entry)
    return entry


def _unknown(key: str, known: Sequence[str]) -> str:
    return f"{shown(key)!r} is no known key; {_nearest(key, known)}"


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name[:80], known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known[:20])}"


def _check(what: str, name: str, entry: Entry) -> None:
    if _NAME.fullmatch(name) is None:
        raise UserError(
            f"{what}: the name is {shown(name)!r}; it has 1 to 64 letters, digits, '_', '.' and '-', the first and the last a "
            "letter or digit (any other name goes to `names`)"
        )
    if RESERVED in (name, *entry.names):
        raise UserError(f"{what}: {RESERVED} is the name of the default model; choose another one")
    if any("\0" in text for text in (entry.path, entry.chat_template, *entry.set, *entry.names, *entry.lora)):
        raise UserError(f"{what}: a text has the character \\u0000; leave it out")
    if not entry.path:
        raise UserError(f"{what}: path is empty; give a checkpoint directory, a GGUF file or a hub id")
    if entry.threads is not None and not 1 <= entry.threads <= 1024:
        raise UserError(f"{what}: threads is {entry.threads}, allowed is 1 to 1024")
    for key in ("idle_unload_s", "load_timeout_s", "drain_timeout_s"):
        value = getattr(entry, key)
        if value is not None and not (math.isfinite(value) and 1 <= value <= LONGEST_S):
            raise UserError(f"{what}: {key} is {value:g}, allowed are 1 to {LONGEST_S:g} seconds")
    _check_memory(what, entry.memory)


def _check_memory(what: str, memory: float | str | None) -> None:
    if isinstance(memory, str):
        found = _SHARE.fullmatch(memory)
        if found is None or not 0 < float(found[1]) <= 100:
            raise UserError(f"{what}: memory is {shown(memory)!r}; it is a number of GiB, or a share such as '30%'")
    elif memory is not None and not (math.isfinite(memory) and 0 < memory <= 1 << 20):
        raise UserError(f"{what}: memory is {memory:g}, allowed are more than 0 and up to {1 << 20} GiB")


def told_bytes(entry: Entry, available: int) -> int | None:
    """Memory that the file gives to a model, of so much that is free; None: it leaves that open."""
    if entry.memory is None:
        return None
    if isinstance(entry.memory, str):
        return int(available * float(entry.memory.removesuffix("%")) / 100)
    return int(entry.memory * GIB)


def _counted(where: str, entries: dict[str, Entry], file: Path | None) -> Models:
    if not 1 <= len(entries) <= MAX_MODELS:
        raise UserError(f"{where}: {len(entries)} models, allowed are 1 to {MAX_MODELS}")
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        for each in dict.fromkeys((name, *entry.names, *(adapter.partition("=")[0] for adapter in entry.lora))):
            if (other := owners.setdefault(each, name)) != name:
                raise UserError(f"{where}: {shown(each)!r} is a name of models {other} and {name}; choose another one")
    return Models(entries, file)
