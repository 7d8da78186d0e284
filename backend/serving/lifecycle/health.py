"""StubHealth: whether this stub serves requests, and the sign of life that says so to the launcher."""

from __future__ import annotations

import logging
from collections.abc import Callable

from backend.serving.lifecycle.absence import Absence
from backend.serving.lifecycle.drain import Drain
from backend.serving.lifecycle.environment import Health
from backend.serving.protocols import EngineClient

log = logging.getLogger("everbatch.serving")


class StubHealth:
    """`prepare` loads what reading requests needs, and returns True once it is there. `is_stuck`: no text thread is left.
    `num_live`: how many requests are not answered yet. `report` gets a sign of life: state, number of requests, reason.
    """

    def __init__(
        self,
        executor: EngineClient,
        drain: Drain,
        absence: Absence,
        prepare: Callable[[], bool],
        is_stuck: Callable[[], bool],
        num_live: Callable[[], int],
        report: Callable[[Health, int, str], None],
    ) -> None:
        self._executor, self._drain, self._absence = executor, drain, absence
        self._prepare, self._is_stuck, self._num_live, self._report = prepare, is_stuck, num_live, report
        self.is_prepared = prepare()

    def prepare(self) -> None:
        """Try once more what could not be loaded before; may raise."""
        self.is_prepared = self.is_prepared or self._prepare()

    def state(self) -> Health:
        if self._drain.is_on:
            return "draining"
        if self._executor.has_given_up:
            return "given_up"
        if self._absence.notice() is not None and not self._is_stuck():
            return "ready"  # The engine is away on purpose, and requests are held or told why.
        can_serve = self._executor.is_ready() and self.is_prepared and not self._is_stuck()
        return "ready" if can_serve else "unavailable"

    def give_sign(self) -> None:
        state = self.state()
        self._report(state, self._num_live(), self._why_unavailable() if state == "unavailable" else "")

    def report_unloading(self) -> None:
        """Report that no more signs of life are to be expected from this stub."""
        try:
            self._report("unloaded", 0, "")
        except OSError as error:  # The stub must end in any case; at worst the launcher takes it for dead.
            log.warning("the unloading of this model could not be reported: %s", error)

    def _why_unavailable(self) -> str:
        if why := self._executor.why_not_ready():
            return why
        return "all text threads are stuck" if self._is_stuck() else "the tokenizer is not loaded yet"
