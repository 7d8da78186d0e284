"""Engines of this process: the workers for a checkpoint in a directory, or in memory. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from backend.api.config import EngineConfig

if TYPE_CHECKING:
    from backend.worker.group import InProcessWorkerGroup

Named = Mapping[
    str, Callable[..., Any]
]  # logits post-processors by the names that requests give (worker/post_processors.py)


def with_model_path(config: EngineConfig, path: str) -> EngineConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))


def workers_of(
    config: EngineConfig,
    named: Named | None = None,
    batched: Callable[..., Any] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> InProcessWorkerGroup:
    """With the checkpoint that the configuration names. `progress` is called with each phase of loading.

    Raises ConfigError, which says `File does not exist` when there is no such directory.
    """
    from backend.worker.debug_tensors import DebugFetch
    from backend.worker.group import InProcessWorkerGroup
    from backend.worker.post_processors import PostProcessors

    return InProcessWorkerGroup(
        config.model,
        config.scheduler,
        config.kv_cache,
        progress=progress,
        processors=PostProcessors(named, batched),
        debug=DebugFetch.of(config),
        guided=config.guided,
        lora=config.lora,
        speculation=config.speculation,
    )


def workers_of_buffers(
    tensors: Mapping[str, Any],
    json_config: str,
    config: EngineConfig,
    named: Named | None = None,
    batched: Callable[..., Any] | None = None,
) -> InProcessWorkerGroup:
    """With tensors in memory, by their names in a checkpoint, and the text of config.json. Raises ConfigError."""
    from backend.worker.debug_tensors import DebugFetch
    from backend.worker.group import InProcessWorkerGroup
    from backend.worker.post_processors import PostProcessors

    return InProcessWorkerGroup.from_buffers(
        tensors,
        json_config,
        config.model,
        config.scheduler,
        config.kv_cache,
        PostProcessors(named, batched),
        DebugFetch.of(config),
        config.guided,
        config.lora,
        config.speculation,
    )
