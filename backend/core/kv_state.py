"""KvState: what an engine that has computed a prompt gives to another one that goes on with it.

A state is opaque to clients: MAGIC, BLAKE2b (128 bits) of the rest, and the rest in msgpack. It comes back from outside, so every
part is checked here before anything is made of it. The hash finds damage; it proves nothing about who made the state. Therefore
its KV serves the request that brings it, and no other one.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from backend.api.errors import InvalidRequest

MAGIC = b"everbatch-kv-1\n"
_HASH_BYTES = 16
# msgspec's own errors, and those that pass through it: text that is not UTF-8, nesting that is too deep.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_REMEDY = "send the state as it came, or leave it out"


class KvState(Struct, frozen=True):
    """`blocks`: the KV of `token_ids`, block after block, each as the pool holds it, layer after layer; empty where it does not
    travel, so that the other engine computes it again.
    """

    fingerprint: str  # hash of the model, its format, the kernels and the layout of blocks
    digest: str  # hash of the adapter and of inputs other than tokens (KvOrigin.digest)
    token_ids: list[int]  # the prompt
    first_token_ids: list[int]  # sampled behind it
    block_size: int  # tokens
    block_bytes: int
    blocks: bytes = b""
    stored: str = ""  # the name under which a KvStore keeps the blocks, instead
    stored_hash: bytes = b""

    @property
    def num_blocks(self) -> int:
        """Blocks that the prompt fills, the last one perhaps in part."""
        return -(-len(self.token_ids) // self.block_size)


def encode(state: KvState) -> bytes:
    body = msgspec.msgpack.encode(state)
    return MAGIC + _hash(body) + body


def decode(data: bytes, max_bytes: int) -> KvState:
    """Raises InvalidRequest for whatever is no whole state. `max_bytes`: of its KV."""
    if not data.startswith(MAGIC):
        raise InvalidRequest(f"the opaque state of {len(data)} bytes is none of this version's; {_REMEDY}")
    body = memoryview(data)[len(MAGIC) + _HASH_BYTES :]
    if data[len(MAGIC) : len(MAGIC) + _HASH_BYTES] != _hash(body):
        raise InvalidRequest(
            f"the opaque state of {len(data)} bytes is damaged: its checksum is another one; {_REMEDY}"
        )
    try:
        state = msgspec.msgpack.decode(body, type=KvState)
    except _UNREADABLE:
        raise InvalidRequest(f"the opaque state of {len(data)} bytes cannot be read; {_REMEDY}") from None
    if len(state.blocks) > max_bytes:
        raise InvalidRequest(
            f"the opaque state holds {len(state.blocks)} bytes of KV, the limit is {max_bytes} (kv_transfer.max_bytes); {_REMEDY}"
        )
    is_whole = state.block_size > 0 and state.token_ids and state.block_bytes > 0
    if not is_whole or (state.blocks and len(state.blocks) != state.num_blocks * state.block_bytes):
        raise InvalidRequest(
            f"the opaque state holds {len(state.blocks)} bytes of KV, which is not what {len(state.token_ids)} tokens need; "
            f"{_REMEDY}"
        )
    return state


def hash_of(blocks: bytes) -> bytes:
    """The checksum of blocks that do not travel within their state."""
    return _hash(blocks)


def _hash(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_HASH_BYTES).digest()
