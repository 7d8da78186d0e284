"""A protocol apart from its tensors: the shape of an error to its clients, and some behaviour that they rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from backend.api import EngineConfig, ErrorCode


def named(code: ErrorCode, message: str) -> str:
    """The usual text of an error begins with its code, as in `[UNAVAILABLE] ...`: HTTP clients never see Triton's own."""
    return f"[{code}] {message}"


def prefixed(prefix: str) -> Callable[[ErrorCode, str], str]:
    """The usual text with the protocol's own words in front of the message, except for cancellations."""
    return lambda code, message: named(code, message if code is ErrorCode.CANCELLED else prefix + message)


class Dialect(NamedTuple):
    """`error_text` makes the whole text of an error of its code and message."""

    error_text: Callable[[ErrorCode, str], str] = named
    stop_error: str = ""  # a `stop: true` is answered with CANCELLED and this text; without one by an empty response
    log_name: str = ""  # cancellations by clients that are gone are logged under this name
    every_step: bool = False  # a response for each step of the engine, whatever triton.one_response_per_token says
    reads_parameters: bool = (
        False  # `parse` judges Parameters.others itself; else serving/intake/free_parameters.py does
    )

    def coalesces(self, config: EngineConfig) -> bool:
        """True if tokens that wait for a busy sender share a response."""
        settings = config.triton
        return not self.every_step and (settings.stream_interval_ms > 0 or not settings.one_response_per_token)


PLAIN = Dialect()
