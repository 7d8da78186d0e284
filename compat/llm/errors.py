"""Errors of the LLM API. Each is an EverbatchError and also the standard exception that Python programs catch."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

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


class BatchError(RequestError):
    """Some prompts of a list have failed; the others were generated.

    `outputs`: in the order of the prompts, None for those that failed. `errors`: by the index of the prompt, from 0.
    """

    def __init__(self, outputs: Sequence[Any], errors: Mapping[int, EverbatchError]) -> None:
        number = min(errors)
        super().__init__(
            f"prompt {number}: {errors[number].message} ({len(errors)} of {len(outputs)} prompts failed; the outputs of the "
            f"others are in `outputs` of this exception)",
            errors[number].code,
        )
        self.outputs = list(outputs)
        self.errors = dict(errors)


class BackgroundError(EverbatchError, RuntimeError):
    """The thread that hands responses to their results has failed, so no request can be answered any more."""


class ResultTimeout(TimeoutError, queue.Empty):
    """A result did not arrive in time. Its request goes on."""


def refuse(name: str, value: object, why: str, remedy: str = "leave it out") -> None:
    """Raise NotHere for a parameter that asks for something. None, False and an empty list ask for nothing."""
    if value is not None and value is not False and value != []:
        raise NotHere(f"{name} is set, and {why}; {remedy}")
