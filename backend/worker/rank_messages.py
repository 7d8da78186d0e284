"""The messages of rank 0 and the other ranks, over a socket: frames of msgpack behind eight bytes of length.

    rank 0         Load          MakePool, with the descriptor of the shared memory     Prepare  RunRows  Prepare  RunRows ...
    another rank   Progress ... Loaded or Failed      Ready or Failed                   no answers: who cannot go on ends

Ranks that share no memory (joining.py) begin with more, and RunRows then brings the content of slots:

    rank 0         Load or Refused      Measure       MakePool, with the addresses of the ranks
    another rank   Join    Progress ... Loaded      Measured      Ready or Failed; and a Link to each rank before it

The end of the socket is the end of the other process.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection
from backend.architectures.description import Shard
from backend.worker.native_tier import NativeRows
from backend.worker.prompt_inputs import Embedded
from kernels.common.adapter import Part
from kernels.cpu.ranks import RanksShape


class Load(Struct, frozen=True, tag=True):
    """Load a rank's part of the checkpoint model.path."""

    shard: Shard
    model: ModelConfigSection
    kv_cache: KvCacheConfig
    lora: LoraSection
    tells_content: bool = False  # True: `Loaded` has a hash of the checkpoint


class Join(Struct, frozen=True, tag=True):
    """A rank of another machine wants to be one of the group."""

    program: str  # version of the program
    machine: str  # the same for all ranks of one machine
    cores: int
    port: int  # where other ranks connect to
    rank: int | None = None  # its number, where torchrun or mpirun has given one
    num_ranks: int | None = None


class Refused(Struct, frozen=True, tag=True):
    message: str  # one sentence for the operator


class Link(Struct, frozen=True, tag=True):
    """The first message of a connection on which the native steps of two ranks meet."""

    group: str
    rank: int  # the one that connects


class Measure(Struct, frozen=True, tag=True):
    """Say how much memory is free, now that all ranks have loaded."""


class Measured(Struct, frozen=True, tag=True):
    free_bytes: int


class At(NamedTuple):
    """Where a rank waits for the links of others."""

    rank: int
    host: str
    port: int


class MakePool(Struct, frozen=True, tag=True):
    """Make a KV pool, and map the memory whose descriptor comes with this message. Where `group` is not empty, there is no such
    memory: make a link to every other rank.
    """

    block_size: int
    num_blocks: int
    shape: RanksShape  # the sizes of that memory
    timeout_s: float
    group: str = ""
    ranks: list[At] = []  # all but rank 0


class Numbers(Struct, frozen=True):
    """A tensor, in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Numbers:
        data = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)

    def tensor(self) -> Tensor:
        if not self.data:  # frombuffer takes no empty buffer
            return torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        return torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype)).view(self.shape)


class AdapterPart(Struct, frozen=True):
    layer: int
    linear: str
    first: int
    a: Numbers
    b: Numbers
    scale: float


class Adapter(Struct, frozen=True):
    """A rank's part of a LoRA adapter."""

    content: str
    num_layers: int
    parts: list[AdapterPart]

    @classmethod
    def of(cls, content: str, layers: Sequence[Mapping[str, Sequence[Part]]]) -> Adapter:
        parts = [
            AdapterPart(index, linear, part.first, Numbers.of(part.a), Numbers.of(part.b), part.scale)
            for index, layer in enumerate(layers)
            for linear, parts in layer.items()
            for part in parts
        ]
        return cls(content, len(layers), parts)

    def layers(self) -> list[dict[str, list[Part]]]:
        found: list[dict[str, list[Part]]] = [{} for _ in range(self.num_layers)]
        for part in self.parts:
            held = Part(part.first, part.a.tensor(), part.b.tensor(), part.scale)
            found[part.layer].setdefault(part.linear, []).append(held)
        return found


class Prepare(Struct, frozen=True, tag=True):
    """Changes before the next rows run, in this order."""

    adapters_out: list[str] = []
    adapters_in: list[Adapter] = []
    num_blocks: int = 0  # blocks of the pool from now on; it never shrinks
    copies: Sequence[tuple[int, int]] = ()  # (source, destination) blocks
    swap_out: Sequence[tuple[int, int]] = ()  # (block, place in host memory), before the pool grows
    swap_in: Sequence[tuple[int, int]] = ()  # (block, place in host memory), read back before the copies


class SlotContents(Struct, frozen=True):
    """The token ids and blocks that a step reads, of one row after the other."""

    ids: bytes  # int64
    blocks: bytes  # int32
    block_size: int

    @classmethod
    def of(cls, numbers: NDArray[np.int32], token_ids: Tensor, tables: NDArray[np.int32], size: int) -> SlotContents:
        """numbers: as InputBatch.row_numbers makes them. size: tokens of a block."""
        rows, ids = numbers.tolist(), token_ids.numpy()
        parts = [ids[slot, first : first + count] for slot, first, count, _ in rows]
        blocks = [tables[slot, : -(-(first + count) // size)] for slot, first, count, _ in rows]
        return cls(np.concatenate(parts).tobytes(), np.concatenate(blocks).tobytes(), size)

    def put(self, numbers: NDArray[np.int32], token_ids: Tensor, tables: NDArray[np.int32]) -> None:
        """Write token ids and block tables to the same slots of another process's batch."""
        ids, at_id = np.frombuffer(self.ids, np.int64), 0
        blocks, at_block, own = np.frombuffer(self.blocks, np.int32), 0, token_ids.numpy()
        for slot, first, count, _ in numbers.tolist():
            own[slot, first : first + count] = ids[at_id : at_id + count]
            held = -(-(first + count) // self.block_size)
            tables[slot, :held] = blocks[at_block : at_block + held]
            at_id, at_block = at_id + count, at_block + held


class RunRows(Struct, frozen=True, tag=True):
    """Call the native step. Token ids and block tables are in the shared memory, or else in `slots`."""

    rows: bytes  # int32 [rows, 4], as InputBatch.row_numbers makes them
    wants_logits: bool
    adapters: Sequence[str] = ()
    positions: Numbers | None = None
    embedded_at: Numbers | None = None
    embedded: Numbers | None = None
    slots: SlotContents | None = None

    @classmethod
    def of(cls, rows: NativeRows, wants_logits: bool, slots: SlotContents | None = None) -> RunRows:
        positions = None if rows.positions is None else Numbers.of(rows.positions)
        given = (
            (None, None)
            if rows.embedded is None
            else (Numbers.of(rows.embedded.where), Numbers.of(rows.embedded.vectors))
        )
        embedded_at, embedded = given
        names = list(rows.adapters)
        return cls(rows.numbers.tobytes(), wants_logits, names, positions, embedded_at, embedded, slots)

    def native(self) -> NativeRows:
        numbers: NDArray[np.int32] = np.frombuffer(self.rows, dtype=np.int32).reshape(-1, 4)
        positions = None if self.positions is None else self.positions.tensor()
        embedded = None
        if self.embedded_at is not None and self.embedded is not None:
            embedded = Embedded(self.embedded_at.tensor(), self.embedded.tensor())
        return NativeRows(numbers, self.adapters, positions, embedded)


class Progress(Struct, frozen=True, tag=True):
    line: str


class Loaded(Struct, frozen=True, tag=True):
    kernels: str  # version of the native kernels
    mapped_bytes: int  # weights that are pages of a file
    content: str = ""  # a hash of the checkpoint, where rank 0 wants it


class Ready(Struct, frozen=True, tag=True):
    """The pool is there."""


class Failed(Struct, frozen=True, tag=True):
    message: str  # one sentence for the operator


ToRank = Load | Refused | Measure | MakePool | Prepare | RunRows
FromRank = Progress | Loaded | Measured | Ready | Failed
FromNewcomer = Join | Link
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_from_newcomer: msgspec.msgpack.Decoder[FromNewcomer] = msgspec.msgpack.Decoder(FromNewcomer)
_encode = msgspec.msgpack.Encoder().encode
_LENGTH = 8


def send(to: socket.socket, message: ToRank | FromRank | FromNewcomer, descriptors: Sequence[int] = ()) -> None:
    """Raises OSError, and TimeoutError after the socket's timeout, when the other side does not take it."""
    body = _encode(message)
    length = len(body).to_bytes(_LENGTH, "little")
    if descriptors:
        socket.send_fds(to, [length], descriptors)
    else:
        to.sendall(length)
    to.sendall(body)


def receive(of: socket.socket) -> tuple[ToRank, list[int]]:
    """The next message to a rank, with its descriptors. Raises EOFError when the other process has ended."""
    body, descriptors = _frame(of)
    return _to_rank.decode(body), descriptors


def receive_answer(of: socket.socket) -> FromRank:
    """The next message of a rank. Raises EOFError when its process has ended, TimeoutError after the socket's timeout."""
    return _from_rank.decode(_frame(of)[0])


def receive_first(of: socket.socket) -> FromNewcomer:
    """The first message of a connection. Raises EOFError, OSError, and msgspec.MsgspecError for what is none."""
    return _from_newcomer.decode(_frame(of)[0])


def _frame(of: socket.socket) -> tuple[bytes, list[int]]:
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    length, control, _, _ = of.recvmsg(_LENGTH, room)
    descriptors = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data)
    length += _exactly(of, _LENGTH - len(length)) if length else b""
    if not length:
        raise EOFError
    return _exactly(of, int.from_bytes(length, "little")), list(descriptors)


def _exactly(of: socket.socket, count: int) -> bytes:
    found = bytearray(count)
    view = memoryview(found)
    while view:
        got = of.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(found)
