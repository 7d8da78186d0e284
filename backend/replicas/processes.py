"""Replicas as processes of this machine. They share its cores and the memory for KV; each reads the same mapped weights."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from backend.api.config.schema import CPU_MEMORY_FRACTION, EngineConfig
from backend.api.errors import ConfigError
from backend.executor.executor import Executor

KEY = "workers.replicas"


def start_processes(config: EngineConfig, socket_path: str) -> list[Executor]:
    """Start all replicas, each supervised, and block until they are ready. Raises ConfigError or EngineUnavailable."""
    share = share_of_one(config, len(os.sched_getaffinity(0)))
    number = config.workers.replicas
    paths = [str(Path(socket_path).with_name(f"replica-{index}") / "engine.sock") for index in range(number)]
    with ThreadPoolExecutor(number) as threads:
        starts = [
            threads.submit(
                Executor.launch, of_replica(share, index), path, owns_directory=True, name=f"replica {index}"
            )
            for index, path in enumerate(paths)
        ]
    errors = [error for start in starts if (error := start.exception()) is not None]
    started = [start.result() for start in starts if start.exception() is None]
    if errors:
        shut_down(started)
        raise errors[0]
    return started


def share_of_one(config: EngineConfig, cores: int) -> EngineConfig:
    """The configuration of one replica. Raises ConfigError where replicas cannot share a machine with so many cores."""
    number = config.workers.replicas
    threads = (config.model.num_threads or cores) // number
    if not threads:
        least = min(config.model.num_threads or cores, cores)
        raise ConfigError(
            f"{KEY} is {number}, and this machine gives {least} threads to the model; use {least} or less"
        )
    if config.model.device not in ("auto", "cpu"):
        raise ConfigError(
            f"{KEY} is {number} and model.device is {config.model.device}, and replicas that are processes run on CPUs; "
            f"use --set workers.orchestrator=ray, or one server for each GPU"
        )
    fraction = config.kv_cache.free_memory_fraction or CPU_MEMORY_FRACTION
    return replace(
        config,
        model=replace(config.model, num_threads=threads, device="cpu"),
        kv_cache=replace(config.kv_cache, free_memory_fraction=fraction / number),
        workers=replace(config.workers, replicas=1),
    )


def of_replica(share: EngineConfig, index: int) -> EngineConfig:
    """The configuration of the replica `index`, which has endpoints of its own."""
    return replace(share, kv_events=share.kv_events.of_replica(index), sessions=share.sessions.of_replica(index))


def shut_down(replicas: list[Executor]) -> None:
    """Shut down all replicas at once: each may take some seconds."""
    if replicas:
        with ThreadPoolExecutor(len(replicas)) as threads:
            list(threads.map(Executor.shutdown, replicas))
