"""Errors that are shown to a user as one sentence."""

from __future__ import annotations

from dataclasses import dataclass


class UserError(Exception):
    """Something the user can change; the message is one sentence with the value, the limit and the remedy."""

    exit_code = 2


class ServerFailed(Exception):
    """The server did not start or did not stay up; `log_tail` holds the last lines it wrote.

    `by_chance`: the same start may well succeed when it is tried again.
    """

    exit_code = 1

    def __init__(self, message: str, log_tail: str = "", *, by_chance: bool = False) -> None:
        super().__init__(message)
        self.log_tail = log_tail
        self.by_chance = by_chance


class StartCancelled(Exception):
    """A start was cancelled while wait_ready() waited for it."""


@dataclass(frozen=True)
class EndReason:
    """Why a server that was ready has to end. `final`: it is not worth starting again from here."""

    text: str
    final: bool = False


class SetupError(Exception):
    """The environment cannot be made; the message is one sentence with the remedy."""
