"""Commands of model `everbatch`: requests that want no text, each answered with the end of a reply (EndOfReply).

    {"load_adapter": {"name": "doll", "directory": "doll"}}     requests may name this adapter; a directory below lora.allowed_dir
    {"unload_adapter": "doll"}
    {"list_adapters": true}                                     `text` is the JSON list of their names
    {"look": true}                                              `live` is what the engine does at this moment (api/live_view.py)
    {"metrics": "NAME"}                                         `text` is a page of metrics under vLLM's names, for the model NAME

No text, token or name of a client is part of a live view. The main thread answers `metrics` at once, so that a server that is
full of requests still tells how full it is; its text is empty while the engine does not answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from backend.api import InvalidRequest, Result
from backend.api.live_view import LiveView
from backend.serving.delivery.outputs import Answer, Confirmation, text_array
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import ServingContext
from backend.serving.observe.vllm_page import vllm_page
from backend.serving.protocols import EngineClient
from backend.serving.wires.named_sampling import from_json, json_value
from backend.serving.work import Arrays, Look, NameAdapter, Work

COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


def no_tokens() -> dict[str, int]:
    """The usage of a command that reads no prompt."""
    return dict.fromkeys(COUNTS, 0)


class EndOfReply(Struct, frozen=True, kw_only=True):
    """A command with more to tell has keys of its own besides."""

    text: str = ""
    token_ids: list[int] = []
    finish_reason: str = "stop"
    stop_reason: None = None
    usage: dict[str, int] = msgspec.field(default_factory=no_tokens)

    def arrays(self) -> Arrays:
        """The tensor of the response."""
        return [("response", text_array([msgspec.json.encode(self)]))]


# ---- adapters --------------------------------------------------------------------------------------------------------


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


# ---- a live view -----------------------------------------------------------------------------------------------------


class LookCommand(Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout_s` is what the gateway adds to whatever it sends."""

    look: bool
    timeout_s: float | None = None


class LookReply(EndOfReply, frozen=True, kw_only=True):
    live: LiveView


def is_look(value: Any) -> bool:
    return isinstance(value, dict) and "look" in value


def read_look(value: Any) -> Work:
    """Raises InvalidRequest."""
    command: LookCommand = from_json("request", value, LookCommand)
    if not command.look:
        raise InvalidRequest("look is false, true is expected; leave it out of a request that wants something else")
    return Work(Look(), LookOutput())


class LookOutput(Answer):
    """The one response, once the engine has answered."""

    def __init__(self) -> None:
        super().__init__([])
        self._view: LiveView | None = None

    def feed(self, result: Result) -> int | None:
        self._view = result.live_view
        return None

    def render(self) -> list[Arrays]:
        if self._view is None:
            return []
        return [LookReply(live=self._view).arrays()]


# ---- metrics ---------------------------------------------------------------------------------------------------------

MAX_NAME = 256  # characters
_BEGINNING = b'{"metrics"'  # as it is written without blanks; one with them is refused like any unknown key
_MOST_BYTES = 12 * MAX_NAME + 100  # a name may be escaped


class MetricsCommand(Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout_s` is what the gateway adds to whatever it sends."""

    metrics: str
    timeout_s: float | None = None


def read_metrics(batch: Batch, engine: EngineClient) -> list[Work] | None:
    """The answer; None if the request is another one. Raises InvalidRequest."""
    array = batch.array("request")
    if array is None or array.size != 1 or not bytes(array.flat[0]).startswith(_BEGINNING):
        return None
    batch.check_texts("request", 0, 1, _MOST_BYTES)
    command: MetricsCommand = from_json("request", json_value("request", batch.scalar("request", 0)), MetricsCommand)
    if len(command.metrics) > MAX_NAME:
        raise InvalidRequest(
            f"metrics has {len(command.metrics)} characters, the limit is {MAX_NAME}; use a shorter name"
        )
    hello, stats = engine.hello, engine.latest_stats()
    page = ""
    if hello is not None and stats is not None and engine.is_ready():
        page = vllm_page(stats, hello.config, hello.model.max_seq_len, command.metrics)
    return [Work(None, Answer(EndOfReply(text=page).arrays()))]
