"""The protocol between the engine and its clients: commands to the engine, messages from it. All are frozen values.

Within one process they are handed over as objects; between processes they travel as frames (backend/wire). Request ids are
`client index << CLIENT_SHIFT | counter of that client`, so a response finds its client without a table.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from backend.api.config import EngineConfig
from backend.api.request import Request, RequestId, SessionId
from backend.api.response import Response
from backend.api.stats import EngineStats, Records
from backend.core.step import ModelInfo

CLIENT_SHIFT = 40


class Submit(Struct, frozen=True, tag="submit"):
    request_id: RequestId
    request: Request


class Cancel(Struct, frozen=True, tag="cancel"):
    request_id: RequestId
    keep_output_tokens: int | None = None
    sequence_index: int | None = None  # end only this sequence of the request


class StopSession(Struct, frozen=True, tag="stop_session"):
    request_id: RequestId
    session_id: SessionId
    end: bool = False
    namespace: str = ""


class NameAdapter(Struct, frozen=True, tag="name_adapter"):
    """Requests may name a LoRA adapter from now on, or, without a directory, may not any more."""

    request_id: RequestId
    name: str
    directory: str | None = None


Command = Submit | Cancel | StopSession | NameAdapter


class ClientGone(Struct, frozen=True):
    """A connection has ended. Posted by the server; no client can send it."""

    client_index: int


class Hello(Struct, frozen=True, tag="hello"):
    """First message of the engine on every connection."""

    client_index: int
    model: ModelInfo
    model_path: str  # directory that holds the tokenizer
    config: EngineConfig
    max_kv_tokens: int = 0  # tokens of one sequence that the KV pool can hold
    adapters: Mapping[str, str] = {}  # LoRA adapters that requests may name, with their directories


class Adapters(Struct, frozen=True, tag="adapters"):
    """The new value of Hello.adapters. Sent ahead of the response to the command that has changed it."""

    adapters: Mapping[str, str]


class Responses(Struct, frozen=True, tag="responses"):
    """All responses of one step for this client, in order."""

    responses: list[Response]


class Stats(Struct, frozen=True, tag="stats"):
    stats: EngineStats


class Recorded(Struct, frozen=True, tag="recorded"):
    """Records of steps, ahead of the responses of the same steps."""

    records: Records


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """Sent every TICK_S (backend/api/silence.py), even while a step hangs. `turn_age_s`: duration of the present iteration,
    0 when idle.
    """

    turn_age_s: float


Message = Hello | Responses | Stats | Recorded | Heartbeat | Adapters
