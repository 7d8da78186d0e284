"""JoinedWorkerGroup: a model on ranks of several machines, which join rank 0. This process is rank 0 (docs/design/ranks.md)."""

from __future__ import annotations

import os
import secrets
import select
import socket
from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec.structs import replace

from backend.api.config.schema import EngineConfig, ModelConfigSection, WorkersConfig
from backend.api.errors import ConfigError
from backend.api.processes.launched import ENV, key_of, rank_0_of
from backend.api.processes.setup import physical_cores
from backend.architectures.description import Shard
from backend.core.step import MemoryUse
from backend.models import loader
from backend.worker.checkpoints import content_of
from backend.worker.debug_tensors import DebugFetch
from backend.worker.group import InProcessWorkerGroup
from backend.worker.joining import Joined, JoinPoint, machine_id, machines, network_address
from backend.worker.memory import free_bytes
from backend.worker.post_processors import PostProcessors
from backend.worker.rank_followers import RankFollowers
from backend.worker.rank_messages import Load, Loaded, MakePool
from backend.worker.ranked_group import RankedWorkerGroup
from kernels.cpu.ranks import RankPlace, RanksMemory, RanksShape

END_S = 1.0  # from the end of a rank's links to that of its connection


class JoinedFollower:
    """A rank that has joined, as RankFollowers see it."""

    pid = None

    def __init__(self, rank: int, joined: Joined) -> None:
        self.rank, self.socket, self.who = rank, joined.socket, f"at {joined.host}"

    @property
    def has_ended(self) -> bool:
        return self._is_closed(0.0)

    @property
    def end(self) -> str:
        return "has ended its connection" if self._is_closed(END_S) else "does not answer"

    def _is_closed(self, timeout_s: float) -> bool:
        """True if its end of the connection is closed within that time."""
        try:
            poll = select.poll()
            poll.register(self.socket, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000)) and not self.socket.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def stop(self) -> None:
        """Let it end by itself. Safe to call twice."""
        self.socket.close()


def _point_of(workers: WorkersConfig) -> JoinPoint:
    """Raises ConfigError."""
    address = workers.join_address
    if address == ENV:
        found = rank_0_of(os.environ)
        if found.num_ranks != workers.num_ranks:
            raise ConfigError(
                f"{found.num_ranks} ranks were started, and workers.tensor_parallel_size x workers.pipeline_parallel_size is "
                f"{workers.num_ranks}; start as many"
            )
        address = found.address
    return JoinPoint(network_address(address, key_of(os.environ)))


class JoinedWorkerGroup(RankedWorkerGroup):
    """Implements core.step.WorkerGroup."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] = lambda line: None,
        processors: PostProcessors | None = None,
        debug: DebugFetch | None = None,
        point: JoinPoint | None = None,
    ) -> None:
        """point: where the ranks join; None: at workers.join_address. The other arguments and errors are those of
        RankedWorkerGroup. Also raises ConfigError without a key, and where this machine cannot listen there.
        """
        super().__init__(config, progress, processors, debug)
        self._point = point or _point_of(config.workers)
        self._threads, self._group = config.model.num_threads, secrets.token_hex(16)
        self._joined: list[Joined] = []
        self._ranks_of: Mapping[str, list[int]] = {}

    def free_memory_bytes(self) -> int:
        """The share of one rank in the free memory of the machine where that is least: each has a pool of the same size."""
        draft = 0 if self._draft is None else self._draft.mapped_bytes
        mapped = [self._ready.mapped_bytes + draft, *(loaded.mapped_bytes for loaded in self._found)]
        free = [free_bytes(self.device), *self._others.measure()]
        shares = [
            (min(free[rank] for rank in ranks) - sum(mapped[rank] for rank in ranks)) // len(ranks)
            for ranks in self._ranks_of.values()
        ]
        return max(0, min(shares))

    def memory_use(self) -> MemoryUse:
        """The memory of rank 0 alone."""
        return InProcessWorkerGroup.memory_use(self)

    def shutdown(self) -> None:
        super().shutdown()
        for each in self._joined:
            each.socket.close()
        self._point.close()

    def _threads_of_rank(self, config: EngineConfig) -> int:
        """Until it is known which ranks have joined on this machine."""
        return config.model.num_threads or physical_cores()

    def _section_of(self, rank: int) -> ModelConfigSection:
        """With the threads of a rank: model.num_threads, else its share of its machine's cores. Raises ConfigError."""
        cores = physical_cores() if rank == 0 else self._joined[rank - 1].join.cores
        beside = next(ranks for ranks in self._ranks_of.values() if rank in ranks)
        if len(beside) > cores:
            where = "this machine" if rank == 0 else self._joined[rank - 1].host
            raise ConfigError(f"{len(beside)} ranks have joined on {where}, which has {cores} cores; start fewer there")
        if self._workers.micro_batches == 1:  # the stages take turns
            stage = self._shards[rank].stage
            beside = [each for each in beside if self._shards[each].stage == stage]
        return replace(self._section, num_threads=self._threads or max(1, cores // len(beside)))

    def _follow(self, section: ModelConfigSection, shards: Sequence[Shard]) -> RankFollowers:
        self._joined = self._point.gather(len(shards), self._load_timeout_s, self._progress)
        self._ranks_of = machines(machine_id(), self._joined)
        torch.set_num_threads(self._section_of(0).num_threads or 1)
        loads = [
            Load(shard, replace(self._section_of(rank), path=section.path), self._kv_cache, self._lora, True)
            for rank, shard in enumerate(shards, 1)
        ]
        joined = [JoinedFollower(rank, each) for rank, each in enumerate(self._joined, 1)]
        return RankFollowers(loads, self._load_timeout_s, self._workers.rank_timeout_s, joined)

    def _check_loaded(self, found: Sequence[Loaded]) -> None:
        self._found = found
        assert isinstance(self._checkpoint, loader.CheckpointReader)  # RankedWorkerGroup refuses others
        own = content_of(self._checkpoint, self._section)
        for rank, loaded in enumerate(found, start=1):
            where = f"rank {rank} at {self._joined[rank - 1].host}"
            if loaded.content != own:
                raise ConfigError(
                    f"{where} has another checkpoint at {self.model_path} than rank 0; copy the same files to every machine"
                )
            if loaded.kernels != self._ready.library.version:
                raise ConfigError(
                    f"{where} has the kernels {loaded.kernels}, and rank 0 has {self._ready.library.version}: another "
                    f"instruction set or compiler; set EVERBATCH_ISA to one that all machines have, and install the same compiler"
                )

    def _make_memory(self, shape: RanksShape, place: RankPlace, pool: MakePool) -> RanksMemory:
        at = [each.at(rank) for rank, each in enumerate(self._joined, 1)]
        self._others.make_pool(replace(pool, group=self._group, ranks=at))
        links = self._point.links(self._group, [each.rank for each in at])
        memory = RanksMemory(self._ready.library, shape, place, pool.timeout_s, links=links)
        self._others.share(memory)
        return memory
