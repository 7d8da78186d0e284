"""A rank other than 0: `python -m backend.worker.rank_process --rank N --socket DESCRIPTOR --parent PID`.

Rank 0 starts it (rank_followers.py) and says over the socket what to do (rank_messages.py). It ends when rank 0 does, and when it
cannot go on: rank 0 then knows that it is lost.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from ctypes import CDLL

import torch
from msgspec import Struct

from backend.api.errors import ConfigError
from backend.api.processes.arguments import arguments_of
from backend.api.processes.setup import set_up_logging
from backend.architectures.shards import vocabulary
from backend.models import loader
from backend.worker.checkpoints import content_of, open_checkpoint
from backend.worker.loaded_model import LoadedModel
from backend.worker.memory import free_bytes
from backend.worker.native_tier import NativeCall
from backend.worker.rank_messages import (
    Failed,
    Load,
    Loaded,
    MakePool,
    Measure,
    Measured,
    Prepare,
    Progress,
    Ready,
    Refused,
    RunRows,
    receive,
    send,
)
from kernels.cpu.decoder import UnknownCell
from kernels.cpu.lora import PackedAdapter
from kernels.cpu.ranks import LostRank, RankPlace, RanksMemory

log = logging.getLogger("everbatch.rank")
PR_SET_PDEATHSIG = 1
Links = dict[int, socket.socket]  # connections to the other ranks, by their numbers


class RankArguments(Struct, forbid_unknown_fields=True):
    """`socket`: the descriptor of the connection to rank 0. `parent`: the id of rank 0's process."""

    rank: int
    socket: int
    parent: int


def main() -> int:
    arguments = arguments_of(RankArguments)
    set_up_logging(f"rank {arguments.rank}")
    end_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the supervisor acts on it
    with socket.socket(fileno=arguments.socket) as rank_0:
        try:
            return serve(rank_0)
        except (EOFError, ConnectionError):  # rank 0 is gone
            return 0
        except ConfigError:  # rank 0 knows it
            return 1


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process, even if it is stopped, when the thread that started it ends."""
    if CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError("the kernel refuses PR_SET_PDEATHSIG, which ends this process with its parent")
    if os.getppid() != parent:  # it ended before that
        sys.exit(0)


def serve(rank_0: socket.socket, links_of: Callable[[int, MakePool], Links] | None = None) -> int:
    """Load, make the pool, and run steps until rank 0 is gone. Returns the exit status.

    links_of: makes the links of the rank of this number, where ranks share no memory; it raises ConfigError.
    Raises EOFError or ConnectionError when rank 0 has gone, and ConfigError, after a message to rank 0.
    """
    load, _ = receive(rank_0)
    if isinstance(load, Refused):
        raise ConfigError(load.message)
    assert isinstance(load, Load), "the first message says what to load"
    rank = None
    try:
        rank = RankWorker(load, lambda line: send(rank_0, Progress(line)))
        send(rank_0, rank.loaded(load))
        while True:
            message, descriptors = receive(rank_0)
            match message:
                case Measure():
                    send(rank_0, Measured(free_bytes(torch.device("cpu"))))
                case MakePool():
                    links = links_of(rank.shard.number, message) if links_of and message.group else None
                    rank.make_pool(message, next(iter(descriptors), None), links)
                    send(rank_0, Ready())
                case Prepare():
                    rank.prepare(message)
                case RunRows():
                    rank.run(message)
    except ConfigError as error:
        send(rank_0, Failed(error.message))
        raise
    except (LostRank, UnknownCell) as error:
        log.error("%s; this rank ends", error)
        return 1
    finally:
        if rank is not None:
            rank.close()


class RankWorker:
    """A rank's part of the model and its KV. It does what rank 0 tells it, and knows nothing of requests."""

    def __init__(self, load: Load, progress: Callable[[str], None]) -> None:
        """Raises ConfigError."""
        torch.set_num_threads(load.model.num_threads or 1)
        checkpoint = open_checkpoint(loader.resolve_model_path(load.model.path), load.model.implementation)
        assert isinstance(checkpoint, loader.CheckpointReader), "rank 0 refuses other models"
        self._checkpoint, self.shard = checkpoint, load.shard
        checkpoint.cut(self.shard)
        self._whole = checkpoint.config
        cpu = torch.device("cpu")
        self.model = LoadedModel(checkpoint, load.model, load.kv_cache, cpu, progress, load.lora)
        if self.model.choice.library is None:
            raise ConfigError(f"rank {self.shard.number} has no native kernels, because {self.model.choice.reason}")
        self._library = self.model.choice.library
        self._adapters: dict[str, PackedAdapter] = {}
        self._memory: RanksMemory | None = None

    def loaded(self, load: Load) -> Loaded:
        content = content_of(self._checkpoint, load.model) if load.tells_content else ""
        return Loaded(self._library.version, self.model.mapped_bytes, content)

    def make_pool(self, pool: MakePool, descriptor: int | None, links: Links | None = None) -> None:
        """descriptor: of the memory that all ranks share; links: where they share none. Raises ConfigError when there is no
        memory for the pool.
        """
        place = RankPlace(self.shard.rank, self.shard.stage, vocabulary(self._whole, self.shard)[0])
        memory = RanksMemory(self._library, pool.shape, place, pool.timeout_s, descriptor, links)
        memory.close()
        self._memory, self._tier = memory, self.model.native_tier(pool.block_size, memory)
        self._storage = self.model.storage(pool.block_size, pool.num_blocks)

    def prepare(self, told: Prepare) -> None:
        for content in told.adapters_out:
            del self._adapters[content]
        for adapter in told.adapters_in:
            self._adapters[adapter.content] = PackedAdapter(adapter.layers(), self.model.dtype)
        self._storage.swap_out(told.swap_out)
        self._storage.grow(told.num_blocks)
        self._storage.swap_in(told.swap_in)
        self._storage.copy_blocks(told.copies)

    def run(self, told: RunRows) -> None:
        """Raises LostRank, and UnknownCell for rows that rank 0 should not have told of."""
        assert self._memory is not None  # make_pool has made it
        adapters = [self._adapters[content] if content else None for content in told.adapters]
        of_slots, rows = (self._memory.token_ids, self._memory.block_tables), told.native()
        if told.slots is not None:
            told.slots.put(rows.numbers, *of_slots)
        self._tier.step(NativeCall(rows, adapters, *of_slots, self._storage.pools, told.wants_logits))

    def close(self) -> None:
        """End the links to the other ranks. Safe to call twice."""
        if self._memory is not None:
            self._memory.disconnect()


if __name__ == "__main__":
    sys.exit(main())
