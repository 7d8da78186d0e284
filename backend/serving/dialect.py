"""What a protocol has of its own besides tensors: the words of its errors, and a few habits that its clients count on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from backend.api import ErrorCode


def named(code: ErrorCode, message: str) -> str:
    """The usual text of an error begins with its code, as in `[UNAVAILABLE] ...`: HTTP clients never see Triton's own."""
    return f"[{code}] {message}"


def prefixed(prefix: str) -> Callable[[ErrorCode, str], str]:
    """The usual text with the protocol's own words in front of the message; a cancellation is told without them."""
    return lambda code, message: named(code, message if code is ErrorCode.CANCELLED else prefix + message)


class Dialect(NamedTuple):
    """`error_text` makes the whole text of an error of its code and message."""

    error_text: Callable[[ErrorCode, str], str] = named
    stop_error: str = ""  # a `stop: true` is answered with CANCELLED and this text; without one by an empty response
    log_name: str = ""  # cancellations by clients that are gone are logged under it, for whoever looks for them there
    every_step: bool = False  # a response for each step of the engine, whatever triton.one_response_per_token says
    reads_parameters: bool = False  # `parse` judges Parameters.others itself; else serving/free_parameters.py does


PLAIN = Dialect()
