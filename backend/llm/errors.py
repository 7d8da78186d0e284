"""Errors of this room. All of them are EverbatchErrors, and what Python programs expect besides."""

from __future__ import annotations

import queue

from backend.api import ErrorCode, EverbatchError, InvalidRequest, Unsupported


class ParameterError(InvalidRequest, ValueError):
    """A parameter has a value that can never be used."""


class NotHere(Unsupported, ValueError):
    """A parameter asks for something that this version does not have. It is refused by its name rather than ignored."""


class RequestError(EverbatchError, RuntimeError):
    """One request has failed. The others go on."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        super().__init__(message)
        self.code = code


class BackgroundError(EverbatchError, RuntimeError):
    """The thread that hands responses to their results has failed, so no request can be answered any more."""


class ResultTimeout(TimeoutError, queue.Empty):
    """A result was not there in time. Its request goes on."""


def refuse(name: str, value: object, why: str, remedy: str = "leave it out") -> None:
    """Raise NotHere for a parameter that asks for something. None, False and an empty list ask for nothing."""
    if value is not None and value is not False and value != []:
        raise NotHere(f"{name} is set, and {why}; {remedy}")
