"""A ReplicaFront's live requests, when they may go on at another replica, and the messages that replicas put into its inbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from backend.api.request import Request, RequestId
from backend.api.response import Response
from backend.api.stats import EngineStats, Records
from backend.core.messages import NameAdapter, Resume
from backend.executor.executor import Executor


class RunningRequest(Struct):
    """A request that runs on a replica."""

    request_id: RequestId  # the client's
    replica: int
    num_new_tokens: int  # tokens of its prompt that the replica has to compute
    request: Request | None = None  # kept until its first response; None for a command that is no request
    lost_by: tuple[int, ...] = ()  # replicas that were lost before it began
    resume: Resume | None = None  # its state before this front's life
    movable: Request | None = None  # the request, if another replica may go on with it when its own is lost
    local_id: RequestId = RequestId(0)  # the replica's
    is_cancelled: bool = False


class ReplicaAnswer(Struct):
    """A replica's response, in the inbox."""

    serial: int
    response: Response


class Naming(Struct):
    """A NameAdapter command that all ready replicas have been given."""

    command: NameAdapter
    num_open: int
    error: Response | None = None


class Named(Struct):
    """One replica's answer to a NameAdapter command, in the inbox."""

    naming: Naming
    response: Response


class Door(Protocol):
    """The part of EngineServer that the front uses."""

    def deliver(self, responses: list[Response]) -> None: ...
    def publish_stats(self, stats: EngineStats) -> None: ...
    def publish_records(self, records: Records) -> None: ...
    def publish_adapters(self, adapters: Mapping[str, str]) -> None: ...
    def close(self) -> None: ...


def are_alike(one: Executor, other: Executor) -> bool:
    """True if both give the same bytes: their engines have the same model, with the same settings."""
    hellos = [each.hello for each in (one, other) if each.hello is not None]
    marks = [(replace(each.model, remarks=()), each.checkpoint) for each in hellos]
    return len(marks) == 2 and marks[0] == marks[1]


def may_move(request: Request) -> bool:
    """True if any replica can serve a request whose own was lost: it does not need a session's history, which only that has."""
    return request.session is None or request.session.start


def has_stopped(replica: Executor) -> bool:
    """True if a replica that is connected has been silent for so long that it counts as ended."""
    hello = replica.hello
    return hello is not None and replica.is_connected and replica.silent_s > hello.config.triton.watchdog_timeout_s
