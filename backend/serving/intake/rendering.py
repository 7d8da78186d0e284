"""RenderProcess: renders chats in a process that has limits of time and memory (render_process.py).

A template is a program of the model's, over messages of a client's: it may double a string until the machine has no memory left,
or compute `10 ** 9999999`, which nothing can interrupt. In the stub that would end every request of the model; here it ends
one, with an error that names the limit.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from msgspec import Struct

from backend.api.errors import EngineUnavailable, EverbatchError, InvalidRequest
from backend.core.limited_messages import Ending, Limits, Outcome
from backend.core.limited_process import LimitedProcess, limit_passed
from backend.text.template import Templates

log = logging.getLogger("everbatch.serving")
LIMITS = Limits(cpu_s=2.0, num_bytes=256 << 20)
PATIENCE_S = 8.0  # for one rendering, on a machine whose processors are busy
REMEDY = "send other messages, or start the server with another --chat-template"


class RenderSetup(Struct, frozen=True, forbid_unknown_fields=True):
    """The first message to the process."""

    templates: Templates
    limits: Limits  # for each chat


class RenderProcess:
    """Several threads may call it. The process starts with the first call, and again after its death."""

    def __init__(self, templates: Templates, limits: Limits = LIMITS, patience_s: float = PATIENCE_S) -> None:
        self._limits, self._patience_s = limits, patience_s
        self.process = LimitedProcess("backend.serving.intake.render_process", RenderSetup(templates, limits))

    def start(self) -> None:
        """Start the process in advance."""
        try:
            self.process.start()
        except OSError as error:  # The first chat then fails with this error.
            log.error("no process to render chats can be started: %s", error)

    def __call__(self, with_tools: bool, variables: dict[str, Any]) -> str:
        """Raises InvalidRequest where a limit is passed or the template refuses, and EngineUnavailable without a process."""
        task = json.dumps([with_tools, variables], ensure_ascii=False).encode("utf-8", "surrogatepass")
        outcome = self._outcome(task)
        if outcome.ending is Ending.DONE:
            return outcome.result.decode("utf-8", "surrogatepass")
        raise self._error_of(outcome)

    def close(self) -> None:
        """End the process."""
        self.process.close()

    def _outcome(self, task: bytes) -> Outcome:
        try:
            return self.process.outcome_of(task, self._patience_s)
        except OSError as error:
            log.error("no process to render chats can be started: %s", error)
            return Outcome(0, Ending.LOST)

    def _error_of(self, outcome: Outcome) -> EverbatchError:
        if outcome.ending is Ending.REFUSED:
            return InvalidRequest(outcome.text)
        what = limit_passed(outcome, self._limits, self._patience_s)
        if outcome.ending is Ending.FAILED:
            log.error("rendering a chat failed: %s", outcome.text)
            what = "ends the process that renders"
        if what is None:
            return EngineUnavailable("chats cannot be rendered, because the process for it has ended; try again later")
        return InvalidRequest(f"rendering these messages with the chat template {what}; {REMEDY}")
