"""Errors that may reach a client. Every message names the value, the limit and the remedy; none carries a path or a traceback."""

from __future__ import annotations

import enum
import re

MAX_SHOWN = 100  # characters of a value of the configuration that an error repeats


class ErrorCode(enum.StrEnum):
    """Machine-readable class of an error; the names are those of Triton's status codes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class EverbatchError(Exception):
    """Base of all errors of this project; `code` says which class of status the client sees."""

    code = ErrorCode.INTERNAL

    @property
    def message(self) -> str:
        return str(self)


class InvalidRequest(EverbatchError):
    """A field of a request is outside its limits. Nothing was allocated for it, unless fields turn out to exclude each other
    only when tokens are chosen.
    """

    code = ErrorCode.INVALID_ARGUMENT


class Unsupported(InvalidRequest):
    """A field asks for something this version does not have; it is refused rather than ignored."""

    code = ErrorCode.UNSUPPORTED


class NotFound(InvalidRequest):
    """The name that a request gives does not exist."""

    code = ErrorCode.NOT_FOUND


class Overloaded(EverbatchError):
    """The waiting queue is full: try again later."""

    code = ErrorCode.UNAVAILABLE


class EngineUnavailable(EverbatchError):
    """The engine process is starting, stopping or dead."""

    code = ErrorCode.UNAVAILABLE


class EngineFault(EverbatchError):
    """A defect of this program met a request. It ends that request alone; the log has the exception."""


class ConfigError(EverbatchError):
    """The configuration cannot be used; the message names the key."""

    code = ErrorCode.INVALID_ARGUMENT


class SessionStatus(enum.IntEnum):
    """Numeric codes of a refused session request (docs/features.md 004-30; LMDeploy TurboMind, `Request::Status`)."""

    INVALID = 1  # START with STOP, or a continued session that is not known
    CONFLICT = 2  # the same session twice in one poll of the request queue
    BUSY = 3  # the session is running a turn
    INACTIVE = 4  # STOP of a session that runs nothing
    FAIL = 5  # the engine could not serve the turn
    TOO_LONG = 6  # history + prompt exceed session_len


class SessionError(InvalidRequest):
    """A session request was refused, or its turn failed (FAIL, then with the failure's own code).

    `status` is the code TurboMind's clients know.
    """

    def __init__(self, status: SessionStatus, reason: str, code: ErrorCode = ErrorCode.INVALID_ARGUMENT) -> None:
        super().__init__(f"session error {int(status)} ({status.name.lower()}): {reason}")
        self.status = status
        self.code = code


def session_status(message: str) -> SessionStatus | None:
    """The status of a SessionError by its message, which is what crosses processes; None for the text of any other error."""
    found = re.match(r"session error (\d+) ", message)
    return None if found is None else SessionStatus(int(found[1]))


_LONG_VALUE = re.compile(r"'([^']{64})[^']+'")


def without_long_values(problem: str) -> str:
    """A library's sentence about a client's value, with what it quotes cut after 64 characters."""
    return _LONG_VALUE.sub(r"'\1...'", problem)


def shown(text: str) -> str:
    """The beginning of a text, as long as an error may repeat it."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
