"""Commands of model `everbatch` that change, while the server runs, which LoRA adapters requests may name.

    {"load_adapter": {"name": "doll", "directory": "doll"}}     a directory below lora.allowed_dir
    {"unload_adapter": "doll"}
    {"list_adapters": true}

Each is answered with the end of a reply (end_of_reply.py), whose text is empty, or the JSON list of the names.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from backend.api import InvalidRequest
from backend.serving.delivery.outputs import Confirmation
from backend.serving.intake.requests import ServingContext
from backend.serving.wires.end_of_reply import EndOfReply
from backend.serving.wires.named_sampling import from_json
from backend.serving.work import NameAdapter, Work


class Load(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    directory: str


class AdapterCommand(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of the first three is given. `timeout_s` is what the gateway adds to whatever it sends."""

    load_adapter: Load | None = None
    unload_adapter: str | None = None
    list_adapters: bool = False
    timeout_s: float | None = None


_KEYS = ("load_adapter", "unload_adapter", "list_adapters")


def is_command(value: Any) -> bool:
    return isinstance(value, dict) and any(key in value for key in _KEYS)


def read_command(value: Any, context: ServingContext) -> Work:
    """Raises InvalidRequest, and Unsupported for fields of a request beside a command."""
    command: AdapterCommand = from_json("request", value, AdapterCommand)
    if len(given := [key for key in _KEYS if getattr(command, key)]) != 1:
        raise InvalidRequest(f"exactly one of {', '.join(_KEYS)} is expected, {' and '.join(given) or 'none'} is given")
    if command.load_adapter is not None:
        return Work(NameAdapter(command.load_adapter.name, command.load_adapter.directory), _answer(""))
    if command.unload_adapter is not None:
        return Work(NameAdapter(command.unload_adapter), _answer(""))
    return Work(None, _answer(msgspec.json.encode(list(context.adapters)).decode()))


def _answer(text: str) -> Confirmation:
    return Confirmation(EndOfReply(text=text).arrays())
