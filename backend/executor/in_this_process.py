"""The ways to make an Executor whose engine runs in a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from backend.api.config.schema import EngineConfig
from backend.core.step import WorkerGroup
from backend.executor.load import with_model_path, workers_of, workers_of_buffers
from backend.executor.transport import Transport


class InThisProcess:
    """A part of Executor."""

    def __init__(self, transport: Transport) -> None:
        raise NotImplementedError

    @classmethod
    def in_process(cls, config: EngineConfig, workers: WorkerGroup, model_path: str = "") -> Self:
        """Run an engine in a thread of this process."""
        from backend.executor.engine_thread import InProcessTransport, engine_of

        return cls(InProcessTransport(engine_of(config, workers), model_path))

    @classmethod
    def from_directory(
        cls,
        model_path: str | Path,
        config: EngineConfig | None = None,
        logits_post_processors: Mapping[str, Callable[..., Any]] | None = None,
        batched_logits_post_processor: Callable[..., Any] | None = None,
    ) -> Self:
        """Run an engine in this process with the checkpoint in a directory.

        `logits_post_processors`: by the names that requests give, see worker/post_processors.py. Raises ConfigError, which
        says `File does not exist` when there is no such directory.
        """
        config = with_model_path(config or EngineConfig(), str(model_path))
        workers = workers_of(config, logits_post_processors, batched_logits_post_processor)
        return cls.in_process(config, workers, str(workers.model_path))

    @classmethod
    def from_buffers(
        cls,
        tensors: Mapping[str, Any],
        json_config: str,
        config: EngineConfig | None = None,
        logits_post_processors: Mapping[str, Callable[..., Any]] | None = None,
        batched_logits_post_processor: Callable[..., Any] | None = None,
    ) -> Self:
        """Like `from_directory`, with tensors in memory, by their names in a checkpoint, and the text of config.json."""
        config = config or EngineConfig()
        own = (logits_post_processors, batched_logits_post_processor)
        return cls.in_process(config, workers_of_buffers(tensors, json_config, config, *own))
