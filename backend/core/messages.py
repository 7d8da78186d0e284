"""The protocol between the engine and its clients: commands to the engine, messages from it. All are frozen values.

Within one process they are handed over as objects; between processes they travel as frames (backend/wire). Request ids are
`client index << CLIENT_SHIFT | counter of that client`, so a response finds its client without a table.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from backend.api.config.schema import EngineConfig
from backend.api.request import Request, RequestId, SessionId
from backend.api.response import Response
from backend.api.stats import EngineStats, Records
from backend.core.step import ModelInfo

CLIENT_SHIFT = 40


class Delivered(Struct, frozen=True, omit_defaults=True):
    """The output of one sequence of a request that its client has had."""

    token_ids: list[int] = []
    cum_log_prob: float = 0.0  # where the request asks for log-probabilities
    has_ended: bool = False  # it is not run any more


class Resume(Struct, frozen=True, omit_defaults=True):
    """The state in which earlier engines have left a request, so that this one goes on there (docs/replay.md).

    `is_again`: an engine had accepted it; it has its place in the queue whatever the limits are. `delivered`: an entry for each
    sequence; empty: all begin anew. Without `is_again` it is a client that says so: the engine has not heard of the request.
    `turn`: names a turn of a session in all its lives, so that what an earlier life of it has left in the session is undone
    first; the first life has it too, and undoes nothing. `trial_tokens`: the request
    was running when engines ended, and runs alone until each of its sequences has so many new tokens (engine/trials.py); 0: to
    its end; None: it is not suspected. `first_token_ns`: when the client had its first token, 0 if it had none.
    `arrival_ns`: when the server accepted the request, on the machine's monotonic clock; 0 if that was another server.
    """

    delivered: list[Delivered] = []
    turn: str = ""
    trial_tokens: int | None = None
    first_token_ns: int = 0
    arrival_ns: int = 0
    is_again: bool = False

    def is_life_of(self, turn: str) -> bool:
        """True if a session's turn of this name is an earlier life of this one. A client's part of a name ends with a slash."""
        if not turn or not (self.is_again or self.delivered):
            return False
        clients, slash, _ = self.turn.partition("/")
        return turn == self.turn or (not self.is_again and bool(slash) and turn.startswith(clients + slash))


class Submit(Struct, frozen=True, tag="submit"):
    request_id: RequestId
    request: Request
    resume: Resume | None = None


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


class Look(Struct, frozen=True, tag="look"):
    """Somebody watches the engine: answer with a LiveView (api/live_view.py)."""

    request_id: RequestId


Command = Submit | Cancel | StopSession | NameAdapter | Look


class ClientGone(Struct, frozen=True):
    """A connection has ended. Posted by the server; no client can send it."""

    client_index: int


class Former(Struct, frozen=True, omit_defaults=True):
    """The life of the engine before this one, as its end has left it: messages that it had not sent are lost, this is not."""

    engine: str = ""  # its name (Hello.engine); empty: there was none, or nothing is known of it
    trial: RequestId | None = None  # the request that ran alone when it ended (engine/trials.py)


class Hello(Struct, frozen=True, tag="hello"):
    """First message of the engine on every connection."""

    client_index: int
    model: ModelInfo
    model_path: str  # directory that holds the tokenizer
    config: EngineConfig
    max_kv_tokens: int = 0  # tokens of one sequence that the KV pool can hold
    adapters: Mapping[str, str] = {}  # LoRA adapters that requests may name, with their directories
    engine: str = ""  # names this engine's life: another one has another name
    trial: RequestId | None = None  # see Trial
    checkpoint: str = ""  # a mark of the model's files: another checkpoint of the same shape has another one
    former: Former = Former()


class Trial(Struct, frozen=True, tag="trial"):
    """From now on only this request runs, because engines ended while it did; None: all do again. Sent to all clients."""

    request_id: RequestId | None


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
    """Sent every TICK_S (backend/api/processes/liveness.py), even while a step hangs. `turn_age_s`: duration of the present
    iteration, 0 when idle.
    """

    turn_age_s: float


Message = Hello | Responses | Stats | Recorded | Heartbeat | Adapters | Trial
