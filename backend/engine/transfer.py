"""Transfer: the KV of a prompt leaves this engine with a state (core/kv_state.py), or comes in with one.

    context_only     intake: one output token at most; at the end the blocks are read, and the state goes with the result
    kv_state         intake: the state is checked, its blocks are written and kept for the sequence, which then finds them as it
                     finds KV of its own after a pause: what the pool needs before it is admitted is evicted, and computed again

KV that came from outside serves this sequence alone (`Sequence.kv_is_foreign`).
"""

from __future__ import annotations

import time

from msgspec.structs import replace

from backend.api.config.schema import KvTransferConfig
from backend.api.errors import InvalidRequest, Unsupported
from backend.api.request import Request
from backend.api.stats import EngineCounters
from backend.core.kv_state import KvState, decode, encode, hash_of
from backend.core.sequence import Sequence
from backend.core.step import ModelInfo, WorkerGroup
from backend.kvcache.manager import KVCacheManager
from backend.storage.kv_store import KvStore


class Transfer:
    def __init__(
        self,
        config: KvTransferConfig,
        model: ModelInfo,
        kv: KVCacheManager,
        workers: WorkerGroup,
        counters: EngineCounters,
    ) -> None:
        """Raises ConfigError for a directory of the configuration that cannot be used."""
        self._config, self._model, self._kv, self._workers, self._counters = config, model, kv, workers, counters
        self._store: KvStore | None = None
        if config.enabled and config.directory:
            self._store = KvStore(config.directory, config.directory_bytes, config.ttl_s)

    def check(self, request: Request) -> None:
        """Raise Unsupported for a request that may not be context_only, or bring a state. Nothing of the state is read."""
        if not (request.context_only or request.kv_state):
            return
        name = "context_only" if request.context_only else "a state from another engine"
        sampling = request.sampling_config
        if not self._config.enabled:
            raise Unsupported(
                f"the request asks for {name}, and kv_transfer.enabled is false; start with it set to true"
            )
        if request.context_only and request.kv_state:
            raise InvalidRequest("the request is context_only and brings a state; leave one of both out")
        if request.session is not None:
            raise Unsupported(f"{name} is for requests without a session; leave the session out")
        if sampling.beam_width > 1 or (sampling.num_return_sequences or 1) > 1:
            raise Unsupported(f"{name} is for one sequence; set beam_width and num_return_sequences to 1")
        if request.context_only and request.max_tokens < 1:
            raise InvalidRequest("max_tokens is 0, and context_only computes the first token; set it to 1 or more")

    def read(self, request: Request) -> KvState | None:
        """The state that a request brings; None without one. Raises InvalidRequest for a state that does not fit it."""
        if not request.kv_state:
            return None
        started_ns = time.monotonic_ns()
        state = decode(request.kv_state, self._config.max_bytes)
        if state.token_ids != request.input_token_ids:
            raise InvalidRequest(
                f"the opaque state is that of another prompt, of {len(state.token_ids)} tokens, than the request's of "
                f"{len(request.input_token_ids)}; send both as they came"
            )
        if state.digest != request.kv_origin.digest:
            raise InvalidRequest(
                "the opaque state was computed with another adapter or other inputs; send them as well"
            )
        if (state.blocks or state.stored) and state.fingerprint != self._model.kv_fingerprint:
            raise InvalidRequest(
                f"the opaque state is of an engine with the fingerprint {state.fingerprint[:12]!r}, this one has "
                f"{self._model.kv_fingerprint[:12]!r}: run both with the same checkpoint, settings, kernels and processor, or "
                f"leave the state out"
            )
        state = self._fetched(state)
        self._counters.kv_transfer_ns_total += time.monotonic_ns() - started_ns
        return state

    def _fetched(self, state: KvState) -> KvState:
        """The state with its blocks, if this machine has them. Raises InvalidRequest for damaged ones."""
        num_bytes = state.num_blocks * state.block_bytes
        if not state.stored or self._store is None or num_bytes > self._store.max_bytes:
            return state
        blocks = self._store.take(state.stored, num_bytes)
        if blocks is None:
            return state
        if hash_of(blocks) != state.stored_hash:
            raise InvalidRequest(
                f"the KV that the opaque state refers to is damaged: the checksum of its {num_bytes} bytes is another one; leave "
                f"the state out"
            )
        return replace(state, blocks=blocks)

    def adopt(self, seq: Sequence, state: KvState) -> None:
        """Write the KV of a state into the pool for a sequence that waits. Where it has no room, the KV is computed again."""
        geometry = state.block_size, state.block_bytes
        if not state.blocks or geometry != (self._kv.block_size, self._model.kv_block_bytes):
            return
        started_ns, block_ids = time.monotonic_ns(), self._kv.adopt(seq, len(state.token_ids))
        if block_ids:
            self._workers.write_blocks(block_ids, state.blocks, self._kv.num_backed_blocks)
            self._counters.kv_transfers_total += 1
            self._counters.kv_transfer_ns_total += time.monotonic_ns() - started_ns

    def state_of(self, seq: Sequence) -> bytes:
        """The state of a sequence that has computed its prompt. It must still have its blocks."""
        num_prompt = seq.num_prompt_tokens
        block_ids = self._kv.block_ids(seq)[: self._kv.geometry.blocks_for(num_prompt)]
        state = KvState(
            self._model.kv_fingerprint,
            seq.kv_origin.digest,
            seq.token_ids[:num_prompt],
            seq.token_ids[num_prompt:],
            self._kv.block_size,
            max(1, self._model.kv_block_bytes),
        )
        limit = self._config.max_bytes if self._store is None else self._store.max_bytes
        if not self._model.kv_fingerprint or min(block_ids) < 0 or len(block_ids) * self._model.kv_block_bytes > limit:
            return encode(state)
        blocks = self._workers.read_blocks(block_ids)
        if self._store is None:
            return encode(replace(state, blocks=blocks))
        return encode(replace(state, stored=self._store.put(blocks) or "", stored_hash=hash_of(blocks)))
