"""Errors that are shown to a user as one sentence."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can change; the message is one sentence with the value, the limit and the remedy."""

    exit_code = 2


class ServerFailed(Exception):
    """The server did not start or did not stay up; `log_tail` holds the last lines it wrote."""

    exit_code = 1

    def __init__(self, message: str, log_tail: str = ""):
        super().__init__(message)
        self.log_tail = log_tail


class SetupError(Exception):
    """The environment cannot be made; the message is one sentence with the remedy."""
