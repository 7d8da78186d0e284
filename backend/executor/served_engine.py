"""ServedEngine: an engine that clients reach at an address, in the thread that runs it."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from backend.api.checkpoint.gguf_parts import parts_of
from backend.api.config.schema import EngineConfig
from backend.api.errors import ConfigError
from backend.api.processes.setup import calm_garbage_collector
from backend.api.request import RequestId
from backend.core.messages import Hello
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.engine.restoring import restore_sessions
from backend.engine.session_files import in_directory
from backend.executor.kept_files import KeptFiles
from backend.executor.load import workers_of
from backend.wire.address import ListeningAddress
from backend.wire.engine_server import EngineServer
from backend.wire.kv_publisher import publisher_of

if TYPE_CHECKING:
    from backend.worker.joining import JoinPoint

log = logging.getLogger("everbatch.engine")

# This is how often an idle OpenMP thread looks for work before it sleeps. By libgomp's default it spins for milliseconds. When
# another process (the server, a stub) holds one of the cores, each parallel region then waits for a thread that spins in vain.
SPIN_COUNT = "10000"


def load_libraries() -> None:
    """Load what every engine needs and what takes longest: torch, and the modules that run a model."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # OpenMP reads it when torch is loaded
    import_module("torch")
    import_module("backend.worker.group")


class ServedEngine:
    def __init__(
        self,
        config: EngineConfig,
        address: str | ListeningAddress,
        tell: Callable[[dict[str, object]], None] = lambda line: None,
        kept: KeptFiles = KeptFiles(),  # noqa: B008 (immutable)
        point: JoinPoint | None = None,
    ) -> None:
        """Load the model, and listen; a text is the path of a socket. `tell` gets phases and remarks (engine_process.py).
        `kept`: memory that outlives this process; for sessions `sessions.directory` comes first.
        point: where the engine's other ranks join, if not at workers.join_address.

        Raises ConfigError when model or KV pool cannot be made.
        """
        started = time.monotonic()
        kv_events = publisher_of(config.kv_events)
        tell({"phase": "loading torch"})
        load_libraries()

        tell({"phase": "loading the model"})
        workers = workers_of(
            config, None, None, lambda line: tell({"phase": line}), point, keeps_pool=kept.pool is not None
        )
        workers.starts_guides = True
        core = self._core = EngineCore(config, workers, kv_events=kv_events, pool_descriptor=kept.pool)
        mark = mark_of(Path(workers.model_path))
        session_files = in_directory(config.sessions.directory) if config.sessions.directory else kept.sessions
        if session_files:
            restore_sessions(core, (session_files[0], session_files[1]), mark)
        period_s, clients_hold = config.triton.stats_period_ms / 1000, config.triton.resume_requests
        loop = self._loop = EngineLoop(core, period_s, clients_hold)
        self._tell = tell
        name, former = secrets.token_hex(8), kept.former()
        kept.note_trial(name, None)
        self._note_trial = partial(kept.note_trial, name)
        self._server = EngineServer(
            address,
            loop.post,
            lambda index: Hello(
                *(index, core.model, str(workers.model_path), core.config, core.max_kv_tokens, core.names.directories),
                *(name, loop.trials.request_id, mark, former),
            ),
            present_iteration=lambda: loop.present_iteration,
        )
        if workers.guides is not None:
            workers.guides.wait_until_ready()
        kv = core.kv.stats()
        if kv.cached_num_blocks:
            log.info("%d KV blocks of the engine before this one are kept", kv.cached_num_blocks)
        log.info(
            "ready in %.1f s: %s, %s on %s, %d slots, %d KV blocks of %d tokens",
            time.monotonic() - started,
            core.model.name,
            core.model.dtype,
            core.model.device,
            config.scheduler.max_batch_size,
            kv.max_num_blocks,
            kv.tokens_per_block,
        )
        calm_garbage_collector()
        for remark in core.model.remarks:
            tell({"remark": remark})

    @property
    def port(self) -> int:
        """TCP port on which it listens; only for a NetworkAddress."""
        return self._server.port

    def stop(self) -> None:
        """Make `run` return soon. From any thread, or a signal handler."""
        self._loop.stop()

    def run(self) -> None:
        """Serve until `stop`. Raises WorkersLost."""
        server = self._server
        try:
            self._loop.run(
                *(server.deliver, server.publish_stats, server.publish_records, server.publish_adapters),
                self._publish_trial,
            )
        finally:
            server.close()
            self._core.close()

    def _publish_trial(self, request_id: RequestId | None) -> None:
        """The supervisor hears of a trial first, ahead of all clients. What outlives this process is written before both."""
        self._note_trial(request_id)
        self._tell({"trial": request_id is not None})
        self._server.publish_trial(request_id)


SUFFIXES = (".safetensors", ".gguf", ".bin", ".json")


def mark_of(checkpoint: Path) -> str:
    """A hash of names, sizes and times of change of the files of a directory, or of a GGUF file and the other parts of its model;
    empty where there is none.
    """
    try:
        is_file = checkpoint.is_file()
        files = parts_of(checkpoint) if is_file else [each for each in checkpoint.iterdir() if each.suffix in SUFFIXES]
        facts = sorted((each.name, (status := each.stat()).st_size, status.st_mtime_ns) for each in files)
    except (OSError, ConfigError):
        return ""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
