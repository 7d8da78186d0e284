"""A command of model `everbatch` for people who watch the server: {"look": true}.

It is answered with the end of a reply (end_of_reply.py), with `live` besides: what the engine does at this
moment (api/live_view.py). No text, token or name of a client is part of it.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from backend.api import InvalidRequest, Result
from backend.api.live_view import LiveView
from backend.serving.delivery.outputs import Answer
from backend.serving.wires.end_of_reply import EndOfReply
from backend.serving.wires.named_sampling import from_json
from backend.serving.work import Arrays, Look, Work


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
