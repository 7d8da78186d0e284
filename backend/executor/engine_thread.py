"""An engine in a thread of this process, and an Executor's way to it. A process that talks to an engine process loads none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from backend.api.config.schema import EngineConfig
from backend.api.errors import EngineUnavailable
from backend.api.field_types import with_checked_types
from backend.api.stats import EngineStats
from backend.core.messages import Adapters, Command, Hello, Message, Recorded, Responses, Stats, Submit
from backend.core.step import WorkerGroup
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.executor.transport import ENDED
from backend.wire.kv_publisher import publisher_of

STATS_WAIT_S = (
    0.1  # for the time between two steps; an engine that takes longer waits for its model, and changes nothing
)


def engine_of(config: EngineConfig, workers: WorkerGroup) -> EngineCore:
    """An engine over these workers, which publishes KV events where the configuration says so. Raises ConfigError."""
    kv_events = publisher_of(config.kv_events)
    try:
        return EngineCore(config, workers, kv_events=kv_events)
    except BaseException:
        if kv_events is not None:
            kv_events.close()
        raise


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
