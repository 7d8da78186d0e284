"""A Transport is an Executor's way to its engine, which runs in this process (engine_thread.py) or behind the engine process's
socket.

One thread of a transport calls `on_message` with the engine's messages, in order, and `on_lost` when the engine is gone. A
SocketTransport then tries to reach the engine again until it is closed. Neither callback may raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from backend.api.stats import EngineStats
from backend.core.messages import Command, Message

ENDED = "the engine has stopped; make a new Executor or LLM"


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
