"""When a request may go on at another replica than its own."""

from __future__ import annotations

from msgspec.structs import replace

from backend.api.request import Request
from backend.executor.executor import Executor


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
