"""A KV block of the second level: what is written about it, how it is found, and how it is checked.

A block is found by its key, a hash of the fingerprint of the model, the namespace, its token ids and those of all blocks before
it. On use its record is compared with what is wanted, field by field, and its bytes with their checksum. So a block that is
wrong, torn, foreign or out of date is a miss, and nothing else.

    record   magic | fingerprint | namespace | prefix | checksum of the KV | stamp | tokens | token ids | checksum of all this
    place    the record, filled up with zeros to RecordFormat.num_bytes, and the KV of the block

Namespaces, which are secrets of clients, are written as hashes.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from backend.api.images import packed_ids

MAGIC = b"everbatch-block2"
_FIXED = struct.Struct("<16s32s32s32s16sQI")
_CHECKSUM_BYTES = 16
ROOM_FOR_TOKENS = 8  # bytes of a token id


class Miss(Enum):
    """Why a block of the level could not be used."""

    DAMAGED = "damaged"  # its bytes are not those that were written
    FOREIGN = "foreign"  # it is of another model, format or namespace
    STALE = "stale"  # it holds other tokens, or follows other ones
    STALLED = "stalled"  # the level did not answer in time
    SLOW = "slow"  # loading took longer than computing would have
    FAILED = "failed"  # the level gave an error


def digest_of(text: str) -> bytes:
    """The hash by which a fingerprint or a namespace is written."""
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def checksum_of(*parts: bytes | memoryview) -> bytes:
    """The checksum of the bytes of all parts, one after the other. Lets other threads run while it reads long ones."""
    digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


class BlockRecord(NamedTuple):
    """All that the KV of a block depends on."""

    fingerprint: bytes  # digest_of the model's fingerprint
    namespace: bytes  # digest_of the namespace
    prefix: bytes  # key of the block before it; of the first block `root_of` both
    token_ids: tuple[int, ...]

    @property
    def key(self) -> bytes:
        return hashlib.blake2b(self.prefix + packed_ids(self.token_ids).tobytes(), digest_size=32).digest()


class KeptRecord(NamedTuple):
    """A record as it was found in the level."""

    block: BlockRecord
    checksum: bytes  # that the KV must have
    stamp: int  # records with a greater one were written later


def root_of(fingerprint: bytes, namespace: bytes) -> bytes:
    return hashlib.blake2b(fingerprint + namespace, digest_size=32).digest()


class RecordFormat:
    """The form of the records of a level, whose blocks all hold `block_size` tokens in `block_bytes`."""

    def __init__(self, block_size: int, block_bytes: int) -> None:
        self.block_size, self.block_bytes = block_size, block_bytes
        least = _FIXED.size + ROOM_FOR_TOKENS * block_size + _CHECKSUM_BYTES
        self.num_bytes = -(-least // 64) * 64
        self.place_bytes = self.num_bytes + block_bytes

    def encode(self, block: BlockRecord, data: bytes, stamp: int) -> bytes:
        """The content of a place."""
        return self.encode_record(block, checksum_of(data), stamp) + data

    def encode_record(self, block: BlockRecord, checksum: bytes, stamp: int) -> bytes:
        """The record of a block whose KV has this checksum."""
        fixed = _FIXED.pack(MAGIC, *block[:3], checksum, stamp, len(block.token_ids))
        body = fixed + array("q", block.token_ids).tobytes()
        return (body + checksum_of(body)).ljust(self.num_bytes, b"\0")

    def decode(self, record: bytes) -> KeptRecord | None:
        """The record at the start of a place; None if it is not whole."""
        end = _FIXED.size + ROOM_FOR_TOKENS * self.block_size
        body = record[:end]
        if len(record) < self.num_bytes or record[end : end + _CHECKSUM_BYTES] != checksum_of(body):
            return None
        magic, fingerprint, namespace, prefix, checksum, stamp, num_tokens = _FIXED.unpack_from(body)
        if magic != MAGIC or num_tokens != self.block_size:
            return None
        token_ids = tuple(array("q", body[_FIXED.size :]))
        return KeptRecord(BlockRecord(fingerprint, namespace, prefix, token_ids), checksum, stamp)

    def check(self, place: bytes, wanted: BlockRecord) -> bytes | Miss:
        """The KV of a place, if it is that of `wanted`; else why not."""
        kept = self.decode(place)
        if kept is None or len(place) != self.place_bytes:
            return Miss.DAMAGED
        if kept.block[:2] != wanted[:2]:
            return Miss.FOREIGN
        if kept.block != wanted:
            return Miss.STALE
        data = place[self.num_bytes :]
        return data if checksum_of(data) == kept.checksum else Miss.DAMAGED


class Found(NamedTuple):
    """A place whose record could be read."""

    place: int
    record: KeptRecord


class BlockStore(Protocol):
    """A number of places, each of which holds one block. Threads call it, but never two at once for one place."""

    @property
    def num_places(self) -> int: ...

    def scan(self) -> Iterable[Found]:
        """Find the blocks that an engine before this one has left. Raises OSError."""
        ...

    def read(self, place: int) -> bytes:
        """Raises OSError."""
        ...

    def write(self, place: int, content: bytes) -> None:
        """Raises OSError. What a place holds after a failure is found out when it is read."""
        ...

    def close(self) -> None:
        """Release it. Nothing reads or writes any more."""
        ...


class HostBlocks:
    """A BlockStore in the memory of this process."""

    def __init__(self, num_places: int) -> None:
        self._places: list[bytes] = [b""] * num_places

    @property
    def num_places(self) -> int:
        return len(self._places)

    def scan(self) -> Iterable[Found]:
        return ()

    def read(self, place: int) -> bytes:
        return self._places[place]

    def write(self, place: int, content: bytes) -> None:
        self._places[place] = content

    def close(self) -> None:
        self._places = [b""] * len(self._places)


def chain(
    fingerprint: bytes, namespace: str, token_ids: Sequence[int], block_size: int, num_blocks: int
) -> Iterable[BlockRecord]:
    """The records of the first blocks of a sequence. Lazy."""
    origin = digest_of(namespace)
    prefix = root_of(fingerprint, origin)
    for start in range(0, num_blocks * block_size, block_size):
        record = BlockRecord(fingerprint, origin, prefix, tuple(token_ids[start : start + block_size]))
        yield record
        prefix = record.key
