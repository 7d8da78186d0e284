"""The error for requests that were lost with an engine process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backend.wire.client import wait_until

if TYPE_CHECKING:
    from backend.executor.engine_supervisor import EngineProcess

LOST = "the engine process ended while the request ran; send it again in a few seconds"
MAX_DEATH_WAIT_S = 1.0  # by then the supervisor has noticed a death, and decided if the engine is started again


def why_lost(process: EngineProcess | None, num_deaths: int, is_shut_down: Callable[[], bool]) -> str:
    """`process`: the supervised engine of this Executor, None if it only attached. Waits for the supervisor's decision.

    `num_deaths`: of the process when the lost connection was made.
    """
    if process is None or is_shut_down():
        return LOST
    wait_until(lambda: process.num_deaths > num_deaths or is_shut_down(), MAX_DEATH_WAIT_S)
    return process.why_given_up or LOST
