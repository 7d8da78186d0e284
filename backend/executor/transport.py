"""A Transport is an Executor's way to its engine, which runs in this process or behind the engine process's socket.

One thread of a transport calls `on_message` with the engine's messages, in order, and `on_lost` when the engine is gone. A
SocketTransport then tries to reach the engine again until it is closed. Neither callback may raise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from backend.api.errors import EngineUnavailable
from backend.api.field_types import with_checked_types
from backend.api.stats import EngineStats
from backend.core.messages import Adapters, Command, Hello, Message, Recorded, Responses, Stats, Submit
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop

ENDED = "the engine has stopped; make a new Executor or LLM"
STATS_WAIT_S = (
    0.1  # for the time between two steps; an engine that takes longer waits for its model, and changes nothing
)


class Transport(Protocol):
    is_remote: bool  # True if the engine is another process, which sends heartbeats and is watched

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id, once a connection was made."""
        ...

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        """Begin to deliver messages. It is called once."""
        ...

    def send(self, command: Command) -> None:
        """Send a command without blocking.

        Raises EngineUnavailable when no engine can be reached, and InvalidRequest when the command is too large, cannot be
        encoded, or has a field of a wrong type.
        """
        ...

    def ask_stats(self) -> EngineStats | None:
        """Statistics of this moment; None where the engine is another process, which sends them once in a period."""
        ...

    def is_abandoned(self) -> bool:
        """True if it is certain that no engine will be there again."""
        ...

    def reconnect(self) -> None:
        """Give up the present connection, if there is one, and make another. Only where the engine is another process."""
        ...

    def close(self, drain: bool) -> None:
        """End the transport. When this returns no more messages will come."""
        ...


class InProcessTransport:
    """Runs an EngineLoop in a thread of this process."""

    is_remote = False
    engine_pid = None

    def __init__(self, core: EngineCore, model_path: str = "") -> None:
        self._core = core
        self._model_path = model_path

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self._loop = EngineLoop(self._core)

        def run() -> None:
            try:
                self._loop.run(
                    lambda responses: on_message(Responses(responses)),
                    lambda stats: on_message(Stats(stats)),
                    lambda records: on_message(Recorded(records)),
                    lambda adapters: on_message(Adapters(adapters)),
                )
            finally:
                on_lost()  # requests that were posted while the loop ended get an answer, too

        self._thread = threading.Thread(target=run, name="engine-loop", daemon=True)
        core = self._core
        names = core.names.directories
        on_message(Hello(1, core.model, self._model_path, core.config, core.max_kv_tokens, names))
        self._thread.start()

    def send(self, command: Command) -> None:
        if not self._thread.is_alive():
            raise EngineUnavailable(ENDED)
        if isinstance(command, Submit):
            command = Submit(command.request_id, with_checked_types(command.request), command.resume)
        self._loop.post(command)

    def ask_stats(self) -> EngineStats | None:
        """Waits for a moment between two steps, except in a callback of the engine's own thread."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            with contextlib.suppress(TimeoutError):
                return self._loop.ask_stats().result(STATS_WAIT_S)
        return self._core.stats()

    def is_abandoned(self) -> bool:
        return not self._thread.is_alive()

    def reconnect(self) -> None:
        """There is no connection."""

    def close(self, drain: bool) -> None:
        self._loop.stop(drain)
        self._thread.join()
        self._core.close()
