"""1/multi_lora.json of a model: the LoRA adapters that its requests may name, as Triton's vLLM backend has it.

{"doll": "/weights/loras/doll", "sheep": "loras/sheep"}        name -> PEFT directory, relative to that of the file
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from backend.api import ConfigError, EverbatchError, Unsupported
from backend.api.checkpoint.adapter_files import check_adapter_files
from backend.api.checkpoint.model_files import shown
from backend.api.config.schema import LoraSection
from backend.api.lora import MAX_NAME_SHOWN, LoraConfig

FILE = "multi_lora.json"
MAX_BYTES = 1 << 20
MAX_NAMED = 10


class Refusals(NamedTuple):
    """Texts of errors: for a `name` if there are no adapters, and for a name that is not one of `known`."""

    without_any: str
    unknown: str
    shown: Callable[[list[str]], str]  # how the known names are listed


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(name[:MAX_NAME_SHOWN] for name in names[:MAX_NAMED]) + more


OURS = Refusals(
    "lora_name is {name!r}, and no adapter has a name here; start the server with --lora {name}=DIRECTORY, or with lora.enabled "
    "and lora.adapters, or leave lora_name out",
    "lora_name is {name!r}, there are {known}; name one of them, or leave lora_name out",
    _some,
)
# Triton's vLLM backend's own words, in which its clients read them.
NOT_SUPPORTED = "is not supported, we currently support"
VLLMS = Refusals("LoRA feature is not enabled.", f"LoRA {{name}} {NOT_SUPPORTED} {{known}}", str)


def read_adapters(directory: Path) -> dict[str, str]:
    """Name -> path; nothing where there is no file. Raises ConfigError."""
    try:
        with (directory / FILE).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    try:
        given = json.loads(text) if len(text) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not all(isinstance(path, str) and path for path in given.values()):
        raise ConfigError(f"{FILE} is no JSON object of adapters' names and the paths of their PEFT directories")
    return {name: str(directory / path) for name, path in given.items()}


def check_adapters(adapters: Mapping[str, str], lora: LoraSection) -> None:
    """Raise ConfigError for an adapter that every request with its name would be refused for."""
    for name, path in adapters.items() if lora.enabled else ():
        try:
            check_adapter_files(Path(path), lora.max_rank)
        except EverbatchError as error:
            raise ConfigError(f"{FILE}: adapter {shown(name)}: {error.message}") from None


def named_adapter(
    name: str | None, adapters: Mapping[str, str], is_enabled: bool, words: Refusals = OURS
) -> LoraConfig | None:
    """The adapter of a request that names one. Raises Unsupported where there are none, or none of this name."""
    if name is None:
        return None
    if not is_enabled or not adapters:
        raise Unsupported(words.without_any.format(name=name[:MAX_NAME_SHOWN]))
    if name not in adapters:
        raise Unsupported(words.unknown.format(name=name[:MAX_NAME_SHOWN], known=words.shown(list(adapters))))
    # An id that no client is likely to have chosen.
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return LoraConfig(int.from_bytes(digest, "little") | 1 << 63, path=adapters[name], name=name)
