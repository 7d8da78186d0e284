"""Errors for the clients of a guide that could not be compiled."""

from __future__ import annotations

import logging

from backend.api.config.schema import GuidedConfig
from backend.api.errors import EngineUnavailable, EverbatchError, Overloaded
from backend.api.guide import InvalidGuide
from backend.core.limited_messages import Ending, Outcome

log = logging.getLogger("everbatch.guided")


def error_of(outcome: Outcome, config: GuidedConfig) -> EverbatchError:
    """The error that clients get when compiling failed. An exception of the library is logged; clients get its class."""
    match outcome.ending:
        case Ending.REFUSED:
            return InvalidGuide(outcome.text, outcome.place)
        case Ending.OVER_CPU:
            return InvalidGuide(
                f"to compile it takes more than {config.compile_cpu_s:g} s of processor time (guided.compile_cpu_s); simplify it"
            )
        case Ending.OVER_MEMORY:
            return InvalidGuide(
                f"to compile it takes more than {config.compile_bytes} bytes of memory (guided.compile_bytes); simplify it"
            )
        case Ending.FAILED:
            log.error("a guide failed: %s", outcome.text)
            return failure(outcome.text.strip().rpartition("\n")[2].partition(":")[0])
        case _:
            return no_process()


def failure(name: str) -> InvalidGuide:
    """The error for an exception of the library. `name`: its class; its text, which may hold paths, is left out."""
    return InvalidGuide(f"it cannot be compiled ({name[:80]}); the engine's log says why")


def no_process() -> EngineUnavailable:
    return EngineUnavailable("guides cannot be compiled now, for their process has ended; try again later")


def lateness(is_begun: bool, limit_s: float) -> EverbatchError:
    """The error at the end of `compile_timeout_s`. is_begun: compiling had begun; otherwise the guide still waited its turn."""
    if is_begun:
        return Overloaded(
            f"the guide was not compiled within {limit_s:g} s (guided.compile_timeout_s), for the machine is busy; "
            f"try again later"
        )
    return Overloaded(
        f"the guide has waited {limit_s:g} s for others to be compiled (guided.compile_timeout_s); try again later"
    )
