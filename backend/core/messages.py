"""What a client of the engine and the engine tell each other: commands one way, messages the other. Frozen values.

In one process they are handed over as they are; between processes they travel as frames (backend/wire). Request ids are
`client index << CLIENT_SHIFT | counter of that client`, so a response finds its client without a table.
"""

from __future__ import annotations

from msgspec import Struct

from backend.api.config import EngineConfig
from backend.api.request import Request, RequestId, SessionId
from backend.api.response import Response
from backend.api.stats import EngineStats, Records
from backend.core.step import ModelInfo

HEARTBEAT_S = 0.25
CLIENT_SHIFT = 40


class Submit(Struct, frozen=True, tag="submit"):
    request_id: RequestId
    request: Request


class Cancel(Struct, frozen=True, tag="cancel"):
    request_id: RequestId
    keep_output_tokens: int | None = None
    sequence_index: int | None = None  # end only this one of the request's sequences


class StopSession(Struct, frozen=True, tag="stop_session"):
    request_id: RequestId
    session_id: SessionId
    end: bool = False
    namespace: str = ""


Command = Submit | Cancel | StopSession


class ClientGone(Struct, frozen=True):
    """What the server tells the loop when a connection has ended. No client can send it."""

    client_index: int


class Hello(Struct, frozen=True, tag="hello"):
    """First message of the engine on every connection."""

    client_index: int
    model: ModelInfo
    model_path: str  # directory that holds the tokenizer
    config: EngineConfig
    max_kv_tokens: int = 0  # what the KV pool holds of one sequence


class Responses(Struct, frozen=True, tag="responses"):
    """All responses of one step for this client, in order."""

    responses: list[Response]


class Stats(Struct, frozen=True, tag="stats"):
    stats: EngineStats


class Recorded(Struct, frozen=True, tag="recorded"):
    """Records of steps, ahead of the responses of the same steps."""

    records: Records


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """Sent every HEARTBEAT_S, whatever the loop does. `turn_age_s`: for how long it has been in its present turn, 0 when idle."""

    turn_age_s: float


Message = Hello | Responses | Stats | Recorded | Heartbeat
