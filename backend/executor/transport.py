"""A Transport is an Executor's way to its engine, which runs in this process or behind the engine process's socket.

One thread of a transport calls `on_message` with the engine's messages, in order, and `on_lost` when the engine is gone. A
SocketTransport then tries to reach the engine again until it is closed. Neither callback may raise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from backend.api.errors import EngineUnavailable
from backend.api.field_types import check_field_types
from backend.core.messages import Command, Hello, Message, Recorded, Responses, Stats, Submit
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop


class Transport(Protocol):
    is_remote: bool  # whether the engine is another process, which sends heartbeats and has to be watched

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        """Begin to deliver messages. It is called once."""
        ...

    def send(self, command: Command) -> None:
        """Send a command without blocking.

        Raises EngineUnavailable when no engine can be reached, and InvalidRequest when the command is too large, cannot be
        encoded, or has a field of a wrong type.
        """
        ...

    def close(self, drain: bool) -> None:
        """End the transport. When this returns no more messages will come."""
        ...


class InProcessTransport:
    """Runs an EngineLoop in a thread of this process."""

    is_remote = False

    def __init__(self, core: EngineCore, model_path: str = "") -> None:
        self._core = core
        self._model_path = model_path

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self._loop = EngineLoop(self._core)
        arguments = (
            lambda responses: on_message(Responses(responses)),
            lambda stats: on_message(Stats(stats)),
            lambda records: on_message(Recorded(records)),
        )
        self._thread = threading.Thread(target=self._loop.run, args=arguments, name="engine-loop", daemon=True)
        on_message(Hello(1, self._core.model, self._model_path, self._core.config, self._core.max_kv_tokens))
        self._thread.start()

    def send(self, command: Command) -> None:
        if not self._thread.is_alive():
            raise EngineUnavailable("the engine has stopped; make a new Executor or LLM")
        if isinstance(command, Submit):
            check_field_types(command.request)
        self._loop.post(command)

    def close(self, drain: bool) -> None:
        self._loop.stop(drain)
        self._thread.join()
        self._core.workers.shutdown()
