"""A router's side of KV events, with vLLM's own message classes.

The classes are written down from vllm/distributed/kv_events.py of vLLM 0.33.0 (layout "map"), and as its releases of 2025 had
them (layout "array": `array_like=True` on the events, and no fields behind `lora_name` and `extra_keys`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class ArrayBlockStored(ArrayEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class ArrayBlockRemoved(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class ArrayAllBlocksCleared(ArrayEvent, tag="AllBlocksCleared"):
    pass


class ArrayKVEventBatch(EventBatch):
    events: list[ArrayBlockStored | ArrayBlockRemoved | ArrayAllBlocksCleared]


BATCHES: dict[str, type[EventBatch]] = {"map": KVEventBatch, "array": ArrayKVEventBatch}
Prefix = tuple[str, tuple[int, ...]]  # salt, token ids from the first one on


class Subscriber:
    """Keeps the set of cached prefixes, from messages alone. `lose` messages on purpose, and it asks for them again."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "", layout: str = "map") -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.subscribe(topic)
        self._replay = replay_endpoint
        self._decoder = msgspec.msgpack.Decoder(BATCHES[layout])
        self.prefixes: dict[bytes | int, Prefix] = {}
        self.events: list[Any] = []
        self.next_number = 0
        self.num_replayed = 0
        self.lose = 0  # of the next messages so many are thrown away

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self, timeout_s: float = 0.0) -> None:
        """Take in what has arrived; wait for the first message."""
        while self._sub.poll(int(timeout_s * 1000)):
            timeout_s = 0.0
            _, number, payload = self._sub.recv_multipart()
            if self.lose:
                self.lose -= 1
                continue
            if int.from_bytes(number, "big") > self.next_number and self._replay:
                for missed, message in self.ask_again(self.next_number):
                    if missed < int.from_bytes(number, "big"):
                        self.num_replayed += 1
                        self._take(missed, message)
            if int.from_bytes(number, "big") >= self.next_number:
                self._take(int.from_bytes(number, "big"), payload)

    def ask_again(self, first: int) -> list[tuple[int, bytes]]:
        """The messages that are kept from number `first` on, as the engine sends them."""
        request = self._context.socket(zmq.DEALER)
        request.connect(self._replay)
        request.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, bytes]] = []
        while request.poll(10_000):
            _, _, number, payload = request.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                request.close(linger=0)
                return found
            found.append((int.from_bytes(number, "big"), payload))
        raise AssertionError("the replay does not come to an end")

    def _take(self, number: int, payload: bytes) -> None:
        self.next_number = number + 1
        batch = self._decoder.decode(payload)
        assert batch.data_parallel_rank == 0 and batch.ts > 1e9
        for event in batch.events:
            self.events.append(event)
            match type(event).__name__.removeprefix("Array"):
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    for block_hash in event.block_hashes:
                        del self.prefixes[block_hash]
                case _:
                    self.prefixes.clear()

    def _store(self, event: BlockStored | ArrayBlockStored) -> None:
        keys = (event.extra_keys or [None])[0] or ("",)
        salt, before = (keys[0], ()) if event.parent_block_hash is None else self.prefixes[event.parent_block_hash]
        assert event.medium == "GPU" and len(event.token_ids) == event.block_size * len(event.block_hashes)
        for index, block_hash in enumerate(event.block_hashes):
            before = (*before, *event.token_ids[index * event.block_size : (index + 1) * event.block_size])
            assert block_hash not in self.prefixes
            self.prefixes[block_hash] = (salt, before)

    def cached_tokens(self, token_ids: list[int], salt: str, block_size: int) -> int:
        """Tokens at the front of a prompt that the engine has, by what it has told. The last token is always computed."""
        known, count = set(self.prefixes.values()), 0
        while count + block_size < len(token_ids) and (salt, tuple(token_ids[: count + block_size])) in known:
            count += block_size
        return count
