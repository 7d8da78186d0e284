"""1/multi_lora.json of a model: the LoRA adapters that its requests may name, as Triton's vLLM backend has it.

{"doll": "/weights/loras/doll", "sheep": "loras/sheep"}        name -> PEFT directory, relative to that of the file
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from backend.api import ConfigError, Unsupported
from backend.api.lora import LoraConfig

FILE = "multi_lora.json"
MAX_BYTES = 1 << 20
NOT_ENABLED = "LoRA feature is not enabled."
NOT_SUPPORTED = "is not supported, we currently support"


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


def named_adapter(name: str | None, adapters: Mapping[str, str], is_enabled: bool) -> LoraConfig | None:
    """The adapter of a request that names one. Raises Unsupported with the texts of Triton's vLLM backend."""
    if name is None:
        return None
    if not is_enabled or not adapters:
        raise Unsupported(NOT_ENABLED)
    if name not in adapters:
        raise Unsupported(f"LoRA {name[:256]} {NOT_SUPPORTED} {list(adapters)}")
    # An id that no client is likely to have chosen.
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return LoraConfig(int.from_bytes(digest, "little") | 1 << 63, path=adapters[name])
