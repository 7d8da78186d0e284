"""Workers of this process for a checkpoint in a directory, or in memory. Importing this loads no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from backend.api.config.schema import EngineConfig
from backend.api.errors import ConfigError
from backend.api.processes.launched import Launched, key_of

if TYPE_CHECKING:
    from backend.worker.group import InProcessWorkerGroup
    from backend.worker.joining import JoinPoint

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
    point: JoinPoint | None = None,
    keeps_pool: bool = False,
) -> InProcessWorkerGroup:
    """With the checkpoint that the configuration names. `progress` is called with each phase of loading. point: where ranks of
    other machines join, if not at workers.join_address. keeps_pool: there is memory for the KV pool that outlives this process.

    Raises ConfigError, which says `File does not exist` when there is no such directory.
    """
    if config.workers.has_replicas:
        raise ConfigError(
            f"workers.replicas is {config.workers.replicas} and workers.orchestrator is {config.workers.orchestrator}, and "
            f"replicas are processes of their own; give the engine one (orchestrator_type='rpc'), or use 1 and `processes`"
        )
    from backend.worker.debug_tensors import DebugFetch
    from backend.worker.group import InProcessWorkerGroup
    from backend.worker.post_processors import PostProcessors

    if config.workers.num_ranks > 1:
        from backend.worker.joined_group import JoinedWorkerGroup
        from backend.worker.ranked_group import RankedWorkerGroup

        processors, debug = PostProcessors(named, batched), DebugFetch.of(config)
        if point is not None or config.workers.join_address:
            return JoinedWorkerGroup(config, progress, processors, debug, point)
        return RankedWorkerGroup(config, progress, processors, debug)
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
        kv_transfer=config.kv_transfer,
        keeps_pool=keeps_pool,
        images=config.images,
    )


def workers_of_buffers(
    tensors: Mapping[str, Any],
    json_config: str,
    config: EngineConfig,
    named: Named | None = None,
    batched: Callable[..., Any] | None = None,
) -> InProcessWorkerGroup:
    """With tensors in memory, by their names in a checkpoint, and the text of config.json. Raises ConfigError."""
    if config.workers.num_ranks > 1:
        raise ConfigError(
            f"the configuration has {config.workers.num_ranks} ranks, and the tensors of the model are in this process, where "
            f"other ranks cannot read them; save a checkpoint, and give its directory"
        )
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
        config.kv_transfer,
    )


def join_rank_0(found: Launched, timeout_s: float) -> Callable[[], int]:
    """Join as the rank that torchrun or mpirun has counted. timeout_s: for rank 0 to answer. Raises ConfigError.

    Returns what runs this rank until its group ends.
    """
    key = key_of(os.environ)
    from backend.worker.joined_rank import JoinedRank
    from backend.worker.joining import network_address

    return JoinedRank(network_address(found.address, key), found.rank, found.num_ranks, timeout_s).serve
