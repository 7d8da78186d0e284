"""RanksMemory: what the ranks of a model share (native/ranks.h), and besides the slots' token ids and block tables."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from ctypes import CDLL, byref, pointer
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.structs import RanksStruct

_PAGE = 4096


class RanksShape(NamedTuple):
    """Sizes that all ranks of a model know alike."""

    size: int  # ranks of a stage
    stages: int
    micro_batches: int  # parts of a step that the stages work on at the same time
    max_tokens: int  # tokens of one step
    hidden: int
    vocab: int
    slots: int
    max_seq_len: int
    max_blocks: int  # blocks of one slot


class RankPlace(NamedTuple):
    """Which rank of which stage a process is."""

    rank: int = 0
    stage: int = 0
    first_token: int = 0  # the first of its part of the vocabulary


class LostRank(Exception):
    """A rank has kept others waiting for too long, or its process has ended."""

    def __init__(self, rank: int):
        """rank: its number among the ranks of all stages."""
        super().__init__(f"rank {rank} is lost")
        self.rank = rank


class RanksMemory:
    def __init__(
        self,
        library: CDLL,
        shape: RanksShape,
        place: RankPlace,
        timeout_s: float,
        descriptor: int | None = None,
        links: Mapping[int, socket.socket] | None = None,
    ) -> None:
        """timeout_s: how long a rank may keep another one waiting.

        descriptor: of the memory that another rank has made; None makes it. It has no name, so nothing is left of it when
        the last process that has it ends. Pages of it are taken when they are first touched.

        links: where the ranks share no memory, a connection to each of the others, by their numbers. This object owns them. Token
        ids and block tables are then this rank's own, and rank 0 sends those that a step needs.
        """
        self._library, self.shape, self.place = library, shape, place
        struct = RanksStruct(
            *(place.rank, shape.size, place.stage, shape.stages),
            *(shape.max_tokens, shape.hidden, shape.vocab, place.first_token, int(timeout_s * 1000)),
        )
        of_ranks = _whole_pages(library.everbatch_ranks_bytes(byref(struct)))
        of_ids = _whole_pages(shape.slots * shape.max_seq_len * 8)
        num_bytes = of_ranks + of_ids + _whole_pages(shape.slots * shape.max_blocks * 4)
        self.descriptor = os.memfd_create("everbatch-ranks") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, num_bytes)
        self._memory = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)
        struct.memory = self._memory.data_ptr()
        self._links = None if links is None else _Links(library, struct, self._memory, links)
        self.struct = pointer(struct)
        ids = self._memory[of_ranks : of_ranks + shape.slots * shape.max_seq_len * 8]
        self.token_ids: Tensor = ids.view(torch.int64).view(shape.slots, shape.max_seq_len)
        tables = self._memory[of_ranks + of_ids :][: shape.slots * shape.max_blocks * 4]
        self.block_tables: NDArray[np.int32] = tables.numpy().view(np.int32).reshape(shape.slots, shape.max_blocks)

    @property
    def samples(self) -> bool:
        """True for the rank that gets tokens and logits."""
        return self.place.rank == 0 and self._is_last

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    @property
    def entering(self) -> Tensor | None:
        """Hidden states float32 [max_tokens, hidden] that the stage before hands on; None: there is none before this one."""
        return self._hidden(self.place.stage - 1) if self.place.stage else None

    @property
    def leaving(self) -> Tensor | None:
        """Hidden states that this stage hands on, alike; None: it is the last one."""
        return None if self._is_last else self._hidden(self.place.stage)

    def lose(self, rank: int) -> None:
        """Let no rank wait for the one of this number any longer. Any thread may call it, also during a step."""
        self._library.everbatch_lose_rank(self.struct, rank)

    @property
    def is_shared(self) -> bool:
        """False where each rank has a copy."""
        return self._links is None

    def disconnect(self) -> None:
        """End the connections to the other ranks, which lose this one. No step may run. Safe to call twice."""
        if self._links is not None and self._links.are_open:
            self.lose((self.shape.stages - 1 - self.place.stage) * self.shape.size + self.place.rank)
            self._links.close()

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as this object."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def _is_last(self) -> bool:
        return self.place.stage == self.shape.stages - 1

    def _hidden(self, stage: int) -> Tensor:
        shape = self.shape
        start = self._library.everbatch_hidden_at(self.struct, stage)
        states = self._memory[start : start + shape.max_tokens * shape.hidden * 4]
        return states.view(torch.float32).view(shape.max_tokens, shape.hidden)


class _Links:
    """Connections to the other ranks (native/links.h), and the threads that take what comes from there."""

    def __init__(self, library: CDLL, struct: RanksStruct, memory: Tensor, links: Mapping[int, socket.socket]) -> None:
        """memory: what the threads write to, so it stays as long as they run."""
        self._library, self._struct, self._memory, self._sockets = library, struct, memory, dict(links)
        struct.links = self._native = library.everbatch_new_links(struct.size * struct.stages)
        for number, each in self._sockets.items():
            each.settimeout(None)
            library.everbatch_link_rank(self._native, number, each.fileno())
        self._threads = [
            threading.Thread(target=self._receive, args=(number,), name=f"everbatch-link-{number}", daemon=True)
            for number in self._sockets
        ]
        for thread in self._threads:
            thread.start()

    @property
    def are_open(self) -> bool:
        return bool(self._sockets)

    def close(self) -> None:
        for each in self._sockets.values():
            with suppress(OSError):  # the other end has gone
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._struct.links = None
        for each in self._sockets.values():
            each.close()
        self._sockets = {}

    def _receive(self, number: int) -> None:
        self._library.everbatch_receive_from_rank(byref(self._struct), number)

    def __del__(self) -> None:
        if not self._sockets:  # else a thread may still use them
            self._library.everbatch_free_links(self._native)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
