"""EndOfReply: what commands of model `everbatch` are answered with. To a client it is the last object of a reply."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from backend.serving.delivery.outputs import text_array
from backend.serving.work import Arrays

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
