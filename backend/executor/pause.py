"""Pauses: what an Executor does with its live commands from the loss of its engine until another one is there.

begin   the connection ended: commands are held (replay.py), or answered with UNAVAILABLE where no engine will come back
look    several times a second meanwhile: has the engine been given up, or been away for too long?
end     an engine says hello: it gets all held commands, ahead of all new ones
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from backend.api.config.schema import EngineConfig
from backend.api.errors import EngineUnavailable, ErrorCode, EverbatchError
from backend.api.request import Request, RequestId
from backend.api.response import Response
from backend.core.messages import Command, Hello, NameAdapter
from backend.core.step import ModelInfo
from backend.executor.replay import Replay
from backend.executor.transport import ENDED, Transport
from backend.executor.watch import OwnedEngine
from backend.wire.client import wait_until

log = logging.getLogger("everbatch.executor")
LOST = "the engine process ended while the request ran; send it again in a few seconds"
OTHER_MODEL = "the engine process ended while the request ran, and came back with another model; send the request again"
NOT_BACK = "the engine is not ready yet; try again in a few seconds"
MAX_DEATH_WAIT_S = 1.0  # by then the supervisor has noticed a death, and decided if the engine is started again


class Pauses:
    def __init__(
        self,
        replay: Replay,
        lock: threading.Lock,
        transport: Transport,
        process: OwnedEngine | None,
        tell: Callable[[Response], None],
    ) -> None:
        """replay, lock: the Executor's live commands, and what guards them
        process: the supervised engine of this Executor, None if it only attached
        tell: gives a response to its caller
        """
        self._replay, self._lock = replay, lock
        self._transport, self._process, self._tell = transport, process, tell
        self._config = EngineConfig()
        self._model: tuple[ModelInfo, str] | None = (
            None  # the model of the engine that was lost, and the mark of its checkpoint
        )
        self._num_deaths = 0  # how often the engine process had died when the present connection was made

    def begin(self, is_shut_down: Callable[[], bool]) -> None:
        """The connection has ended."""
        with self._lock:
            ids = self._replay.ids()
        if not ids:
            return
        if is_shut_down() or not (self._transport.is_remote and self._config.triton.resume_requests):
            self._refuse(ids, self._why_lost(is_shut_down))
            return
        with self._lock:
            not_held = self._replay.hold(time.monotonic())
        log.warning("%d requests wait for the engine to come back", len(ids) - len(not_held))
        self._refuse(not_held, LOST)
        self.look()

    def takes_new(self) -> bool:
        """True if new requests may wait for an engine that is started again."""
        triton = self._config.triton
        is_coming = self._model is not None and self._transport.is_remote and not self._why_over(0.0)
        return is_coming and triton.resume_requests and triton.hold_new_s > 0

    def check_new(self, request: Request) -> None:
        """Raise EngineUnavailable where as many wait already as its queue will hold. The lock must be held."""
        caps, (number, tokens) = self._config.limits, self._replay.newcomers()
        if number >= caps.max_queue_size or tokens + len(request.input_token_ids) > caps.max_queued_tokens:
            raise EngineUnavailable(
                f"{number} new requests wait for the engine to come back, no more do; try again later"
            )

    def look(self) -> None:
        """Answer held commands once it is sure that no engine will come back, or certain for too long."""
        with self._lock:
            overdue = self._replay.overdue(time.monotonic(), self._config.triton.hold_new_s)
        self._refuse(overdue, NOT_BACK)
        with self._lock:
            ids = self._replay.ids() if self._replay.num_held else []
            held_s = self._replay.held_s(time.monotonic())
        why = self._why_over(held_s) if ids else ""
        if why:
            with self._lock:
                new = set(self._replay.overdue(time.monotonic(), -math.inf))
            # A request that came during the pause has not run: it is not to hear that the engine ended while it did.
            self._refuse((each for each in ids if each not in new), why)
            self._refuse(new, NOT_BACK if self._process is None else why)
            with self._lock:
                self._replay.let_go(time.monotonic())

    def end(self, hello: Hello, known_adapters: Iterable[NameAdapter]) -> None:
        """An engine is there. `known_adapters`: names that it may have to learn again, with ids of the Executor's own."""
        self._config = hello.config
        self._num_deaths = 0 if self._process is None else self._process.num_deaths
        model, self._model = self._model, (replace(hello.model, remarks=()), hello.checkpoint)
        with self._lock:
            refused = self._replay.greet(hello)
            num_held = self._replay.num_held
            if num_held and model != self._model:
                refused = [(request_id, OTHER_MODEL) for request_id in self._replay.ids()]
        for request_id, why in refused:
            code = ErrorCode.UNAVAILABLE if why is OTHER_MODEL else ErrorCode.INTERNAL
            self._tell(Response(request_id, error_or_none=why, error_code=code))
        if model is None:
            return
        self._send(known_adapters)
        if not num_held:
            return
        now_s = time.monotonic()
        with self._lock:
            held_s = self._replay.held_s(now_s)
            commands = list(self._replay.again(now_s))
        self._send(commands)
        with self._lock:
            late = self._replay.let_go(now_s)
        self._send(late)
        log.warning("%d requests go on after a pause of %.1f s", num_held - len(refused), held_s)

    def _send(self, commands: Iterable[Command]) -> None:
        for command in commands:
            try:
                self._transport.send(command)
            except EverbatchError as error:
                if (
                    error.code is not ErrorCode.UNAVAILABLE
                ):  # else this engine is lost as well, and the next one gets it
                    self._refuse([command.request_id], error.message, error.code)

    def _refuse(self, ids: Iterable[RequestId], why: str, code: ErrorCode = ErrorCode.UNAVAILABLE) -> None:
        for request_id in ids:
            self._tell(Response(request_id, error_or_none=why, error_code=code))

    def _why_over(self, held_s: float) -> str:
        """Why no engine comes back any more; empty while one may."""
        if self._process is not None:
            return self._process.why_given_up
        limit_s = self._config.triton.attach_timeout_s
        if held_s > limit_s or self._transport.is_abandoned():
            return f"the engine process ended while the request ran, and has not come back for {held_s:.0f} s; send it again"
        return ""

    def _why_lost(self, is_shut_down: Callable[[], bool]) -> str:
        """The error for requests that are not held. Waits for the supervisor's decision."""
        process = self._process
        if not self._transport.is_remote:
            return ENDED
        if process is None or is_shut_down():
            return LOST
        wait_until(lambda: process.num_deaths > self._num_deaths or is_shut_down(), MAX_DEATH_WAIT_S)
        return process.why_given_up or LOST
