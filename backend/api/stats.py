"""Statistics of the engine. Gauges are the state after a step; names ending in _total only grow."""

from __future__ import annotations

import enum

import msgspec
from msgspec import Struct

from backend.api.distributions import Distributions
from backend.api.request import KvOrigin, RequestId
from backend.api.tensor import TensorData


class KvCacheStats(Struct, frozen=True):
    max_num_blocks: int = 0
    free_num_blocks: int = 0  # blocks that hold nothing
    cached_num_blocks: int = 0  # hold KV of an idle sequence or a shared prefix; evictable
    used_num_blocks: int = 0  # held by running sequences
    tokens_per_block: int = 0
    allocated_num_blocks: int = 0  # backed by memory so far (chunked growth)
    alloc_new_blocks_total: int = 0
    reused_blocks_total: int = 0
    missed_blocks_total: int = 0
    evicted_blocks_total: int = 0
    adopted_blocks_total: int = 0  # computed by the engine before this one, and found by a sequence (docs/replay.md)
    dropped_blocks_total: int = 0  # left by the engine before this one, and of no use: torn, damaged, or cut off


MISSES = (
    "damaged",
    "foreign",
    "stale",
    "stalled",
    "slow",
    "failed",
)  # reasons of the second level (core/kept_block.py)


class SecondLevelStats(Struct, frozen=True):
    """KV blocks that are kept outside of the pool (docs/second-level.md). All 0 without a second level."""

    secondary_max_num_blocks: int = 0
    secondary_used_num_blocks: int = 0
    secondary_block_bytes: int = 0  # size of a block with its record
    onboarded_blocks_total: int = 0  # read back into the pool
    offloaded_blocks_total: int = 0  # written
    skipped_blocks_total: int = 0  # not written, because they were evicted first, or there was no room
    recomputed_blocks_total: int = (
        0  # that the level has, and that were computed, because that was expected to be quicker
    )
    misses_total: dict[str, int] = {}  # blocks that could not be used, by reason
    load_bytes_per_s: float = 0.0  # pace of the latest loads, waits included; 0 before the first
    prefill_tokens_per_s: float = 0.0  # pace of the latest steps with prompts


class SnapshotStats(Struct, frozen=True):
    """Snapshots of the states of recurrent layers (docs/design/state.md). All 0 where the model has none."""

    max_num_snapshots: int = 0
    used_num_snapshots: int = 0
    saved_snapshots_total: int = 0
    restored_snapshots_total: int = 0  # admissions that began behind one
    evicted_snapshots_total: int = 0  # lost because others needed the room; those lost with their block do not count


class ImageStats(Struct, frozen=True):
    """The features of images. All zero for a model that reads none. An image that a request has twice counts once."""

    image_max_bytes: int = 0
    image_used_bytes: int = 0  # features that are held or coming, and pixels of live requests
    images_encoded_total: int = 0
    images_reused_total: int = 0  # images of requests whose features were held, or coming for another request
    images_failed_total: int = 0
    image_encoding_s_total: float = 0.0  # that the encoder has worked


class IterationStats(Struct, frozen=True):
    """One record per engine step."""

    iter: int = 0
    timestamp_ns: int = 0  # wall clock at the end of the step
    iter_latency_ms: float = 0.0
    num_active_requests: int = 0  # accepted and not finished
    num_queued_requests: int = 0  # waiting for their first admission
    num_preparing_requests: int = 0  # waiting for their guide or adapter, ahead of the queue
    num_running_sequences: int = 0  # in a slot
    num_paused_requests: int = 0
    num_completed_requests: int = 0
    num_new_active_requests: int = 0  # ran in this step for the first time
    new_active_requests_queue_latency_ms: float = 0.0  # how long these had waited, all together
    max_num_active_requests: int = 0  # batch slots
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_ctx_tokens: int = 0
    num_empty_gen_slots: int = 0  # rows of a static batch that have ended before it
    num_gen_tokens: int = 0  # tokens of rows in the generation phase, accepted draft tokens included
    micro_batch_id: int = (
        0  # tells steps apart that are in flight together: 0 and 1 in turns while looking ahead, else 0
    )
    num_sessions: int = 0
    cpu_memory_bytes: int = 0  # resident memory of the engine process, after the latest step
    gpu_memory_bytes: int = 0  # memory of torch's allocator on the device; 0 without one
    kv_cache: KvCacheStats = KvCacheStats()
    second_level: SecondLevelStats = SecondLevelStats()
    snapshots: SnapshotStats = SnapshotStats()
    images: ImageStats = ImageStats()

    @property
    def tokens_per_row(self) -> float:
        """Tokens per row in the generation phase; 0 without such rows."""
        return self.num_gen_tokens / self.num_gen_requests if self.num_gen_requests else 0.0


class EngineCounters(Struct):
    """Totals since the engine started; written by EngineCore and the KVCacheManager's owner only."""

    requests_accepted_total: int = 0
    requests_rejected_total: int = 0
    requests_finished_total: dict[str, int] = {}  # by finish reason name, errors as ERROR
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    discarded_tokens_total: int = 0  # generated tokens that no client received, as those behind a stop string
    context_tokens_total: int = 0  # tokens run through the context phase
    answered_prompt_tokens_total: int = 0  # prompt tokens of requests that have their first token
    answered_cached_tokens_total: int = 0  # the part of answered_prompt_tokens_total that was not run
    queried_tokens_total: int = 0  # tokens of a request's first admission, whose KV was looked for
    cached_tokens_total: int = 0  # prompt or history tokens that were not run, because their KV was found
    recomputed_tokens_total: int = 0  # tokens run again because their KV had been evicted
    sequences_evicted_total: int = (
        0  # returning sequences, and prompts that begin as one did, whose KV had been evicted
    )
    pauses_total: int = 0
    steps_total: int = 0
    draft_tokens_total: int = 0  # draft tokens that steps have verified
    accepted_draft_tokens_total: int = 0  # draft tokens that verification accepted
    kv_transfers_total: int = 0  # requests whose prompt's KV came from another engine
    kv_transfer_ns_total: int = 0  # time that reading, checking and writing it has taken


class EngineStats(Struct, frozen=True):
    """A snapshot sent to the Triton stub about once a second."""

    latest: IterationStats
    counters: EngineCounters
    uptime_s: float = 0.0
    started_ns: int = 0  # when this engine was made, of its monotonic clock: tells one engine from the next
    distributions: Distributions = msgspec.field(default_factory=Distributions)
    running_adapters: dict[str, int] = {}  # sequences in a slot, by the name that their request has for its adapter
    waiting_adapters: dict[str, int] = {}  # the same of those in the queue


class RequestStage(enum.IntEnum):
    """Progress of a request."""

    QUEUED = 0  # waits for its first admission, or was paused
    CONTEXT = 1
    GENERATION = 2
    COMPLETE = 3  # reported once, by the step after which it ended


class RequestStats(Struct, frozen=True, omit_defaults=True):
    """One request in one step."""

    request_id: RequestId
    stage: RequestStage
    num_computed_tokens: int = 0  # prompt tokens that are computed so far
    num_output_tokens: int = 0
    is_scheduled: bool = False  # it ran in this step
    is_paused: bool = False
    num_new_blocks: int = 0
    num_reused_blocks: int = 0
    num_decoding_steps: int = 0  # steps that brought output tokens

    @property
    def tokens_per_step(self) -> float:
        """Output tokens for each step that brought some: more than 1 if drafts were accepted, 0 before the first."""
        return self.num_output_tokens / self.num_decoding_steps if self.num_decoding_steps else 0.0


class IterationRequests(Struct, frozen=True):
    """All live requests in one step, and those that ended with it."""

    iter: int
    requests: list[RequestStats]


class StoredBlock(Struct, frozen=True):
    """A block that requests can find; one that never became full has fewer tokens.

    `block_hash` is of its tokens, all tokens before them, and the namespace.
    """

    block_hash: int
    token_ids: list[int]


class BlocksCreated(Struct, frozen=True, tag="created"):
    """The pool was made."""

    num_blocks: int


class BlocksStored(Struct, frozen=True, tag="stored"):
    """Blocks became findable, each the child of the one before; `parent_hash` is that of the first one's parent.

    `origin` is that of the request that computed them: other clients may call the same adapter otherwise.
    """

    parent_hash: int | None
    blocks: list[StoredBlock]
    origin: KvOrigin = KvOrigin()


class BlocksRemoved(Struct, frozen=True, tag="removed"):
    """Blocks cannot be found any more."""

    block_hashes: list[int]


class BlockUpdated(Struct, frozen=True, tag="updated"):
    """A block has another priority in the order of eviction."""

    block_hash: int
    priority: int


class KvEvent(Struct, frozen=True):
    """One change of what can be found in the KV cache. Ids count from 0 without gaps; a gap means that events were dropped."""

    event_id: int
    data: BlocksCreated | BlocksStored | BlocksRemoved | BlockUpdated


class DebugTensors(Struct, frozen=True):
    """Tensors of one step that the configuration asks for, by name."""

    iter: int
    tensors: dict[str, TensorData]


class Records(Struct, frozen=True):
    """Records of single steps, oldest first."""

    iterations: list[IterationStats] = []
    requests: list[IterationRequests] = []
    kv_events: list[KvEvent] = []
    debug_tensors: list[DebugTensors] = []


class PauseCounts(Struct, frozen=True):
    """Totals of an Executor: what has happened while its engine was started again (docs/replay.md)."""

    resumed_requests: int = 0  # requests that went on with another engine; one that did so twice counts twice
    pauses: int = 0
    paused_s: float = 0.0  # all pauses together
