"""KeptFiles: memory that the supervisor holds, and that outlives the engine process. Each engine gets the same descriptors."""

from __future__ import annotations

import argparse
import os
from typing import NamedTuple

from backend.api.config import EngineConfig
from backend.engine.session_files import in_memory

POOL = "kv-pool"  # name of the memory, as /proc shows it


class KeptFiles(NamedTuple):
    sessions: tuple[int, ...] = ()  # two descriptors of the log of sessions, or none
    pool: int | None = None  # the KV pool's (core/pool_file.py)

    @staticmethod
    def make(config: EngineConfig) -> KeptFiles:
        """Make the memory that the engine of this configuration needs: none where several engines stand behind one address."""
        if config.workers.has_replicas:
            return KeptFiles()
        keeps_pool = config.kv_cache.keeps_pool and config.workers.num_ranks == 1
        return KeptFiles(
            () if config.sessions.directory else in_memory(), os.memfd_create(POOL) if keeps_pool else None
        )

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """The options of `arguments`."""
        parser.add_argument("--session-files", nargs=2, type=int, default=[], help="descriptors of the log of sessions")
        parser.add_argument("--kv-pool", type=int, help="descriptor of memory for the KV pool")

    @staticmethod
    def of(options: argparse.Namespace) -> KeptFiles:
        return KeptFiles(tuple(options.session_files), options.kv_pool)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.sessions if self.pool is None else (*self.sessions, self.pool)

    @property
    def arguments(self) -> list[str]:
        """The part of a command line that names these descriptors, which the process must inherit."""
        named = ["--session-files", *map(str, self.sessions)] if self.sessions else []
        return named if self.pool is None else [*named, "--kv-pool", str(self.pool)]

    def empty_pool(self) -> None:
        """Forget all KV, and give its memory back. No engine may have it mapped."""
        if self.pool is not None:
            os.ftruncate(self.pool, 0)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
