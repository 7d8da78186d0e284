"""The one typed configuration. Parsed once, frozen; an unknown key or a value out of range is an error that names the key."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from backend.api.config.endpoints import endpoint_of_replica, is_bound

DType = Literal["auto", "float32", "bfloat16", "float16"]
Kernels = Literal["auto", "native", "torch", "triton"]
Implementation = Literal["auto", "native", "transformers"]
KvNumbers = Literal["int8", "int4"]
KvDType = Literal["auto", "int8", "int4"]
Policy = Literal["guaranteed_no_evict", "max_utilization", "static_batch"]
Preemption = Literal["recompute", "swap"]
Batching = Literal["fused", "separate", "static"]
Sharing = Literal["namespace", "all", "none"]
GuidedBackend = Literal["auto", "llguidance", "xgrammar", "none"]
Decoupled = bool | Literal["both"]
KvEventsLayout = Literal["map", "array"]
Speculation = Literal["none", "lookup", "draft_model"]
Orchestrator = Literal["processes", "ray"]
PlacementStrategy = Literal["PACK", "SPREAD"]
Windows = int | tuple[int, ...]  # tokens; with several windows layer i has entry i modulo their number
ChunkingPolicy = Literal["first_come_first_served", "equal_progress"]


class ModelConfigSection(Struct, frozen=True, forbid_unknown_fields=True):
    """Which checkpoint, and how it is held in memory."""

    path: str = ""  # directory, GGUF file or hub id; empty = models/default, but for `serve` its default model
    dtype: DType = "auto"  # `float32`, `bfloat16`, `float16`; auto = the checkpoint's own
    device: str = "auto"  # cpu, cuda, cuda:1; auto = cuda where there is one
    max_seq_len: int | None = None  # tokens of one sequence, prompt and output; unset = the model's own limit
    num_threads: int | None = None  # torch's intra-op threads; unset = physical cores
    kernels: Kernels = "auto"  # `native` (CPU), `triton` (GPU), `torch`; auto = the best available one
    cuda_graphs: bool = True  # replay steps that only generate as CUDA graphs
    gather_context_logits: bool = False  # requests may ask for the logits of their prompts
    gather_generation_logits: bool = False  # requests may ask for the logits of their output
    additional_outputs: tuple[str, ...] = ()  # tensors that requests may ask for: `hidden_states`, `logits`
    logits_post_processors: tuple[str, ...] = ()  # `name=module:function`, each for requests that give its name
    batched_logits_post_processor: str | None = None  # `module:function` behind the name `batched`, called once a step
    quantization: str = "none"  # `int8`, `w8a8`, `w6a8`, `w4a8`, `auto:BITS` (docs/quantisation.md); none = as stored
    implementation: Implementation = "auto"  # `native`, `transformers` (docs/models.md); auto = native where it can be
    cache_dir: str = ""  # packed weights are kept here for the next start; empty = beside the compiled kernels
    cache_max_gb: float = 20.0  # bound on the packed weights that are kept; the longest unused go first. 0 = none are
    chat_template: str = ""  # file with a Jinja template in place of the model's own; empty = the model's own
    default_sampling: tuple[str, ...] = ()  # `NAME=VALUE`, before generation_config.json's; `none`: without those


SHARE_OF_SNAPSHOTS = 0.25  # kv_cache.snapshots: a share of the memory that is for the KV pool
CPU_MEMORY_FRACTION = 0.25  # kv_cache.free_memory_fraction on a CPU: other programs need the rest of the memory


class KvCacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Size and behaviour of the block pool. Of several size limits the smallest holds."""

    block_size: int = 32  # tokens; a power of two. The native CPU kernels raise less than 32 to 32
    max_tokens: int | None = None  # cap on KV cells of all sequences together
    num_slots: int | None = None  # cap as a number of whole sequences of max_seq_len tokens
    free_memory_fraction: float | None = None  # share of what the weights leave; unset = 0.9 on CUDA, 0.25 on a CPU
    chunk_blocks: int = -1  # blocks obtained at a time: -1 all at once, 1 on demand, k in chunks, 0 = sqrt(num_blocks)
    watermark: float = 0.01  # share of the pool that an admission beside others leaves free
    enable_block_reuse: bool = True  # share blocks between requests with a common prefix
    enable_partial_reuse: bool = True  # copy the matching head of a block that matches only in part
    sharing: Sharing = "namespace"  # `all`: requests without a namespace share per token too; `none`: sessions only
    max_attention_window: Windows | None = None  # tokens that one sees, itself included; a list: for layer after layer
    sink_tokens: int = 0  # the first tokens of a sequence that all others attend to, also from outside of a window
    dtype: KvDType = "auto"  # `int8`, `int4`, keys and values; auto = as the checkpoint says, else the model's own
    directory: str = ""  # KV is kept in a file there too, for after an eviction or a restart; empty: it is not
    directory_bytes: int = 10_737_418_240  # the size of that file; the least recently used blocks go first
    host_cache_bytes: int = 0  # the same in memory of this process, beside the pool of a GPU; 0: none
    survives_engine: bool = True  # the pool of the native kernels outlives a killed engine, and the next one uses it
    swap_bytes: int = 0  # host memory for KV of paused sequences, where scheduler.preemption is `swap`
    onboard_blocks: bool = True  # read such KV back; off: it is only written
    secondary_offload_min_priority: int = 0  # KV that requests retain with a lower priority is not written there
    key_dtype: KvNumbers | None = None  # `int8` with int4 values loses far less than int4; unset = as kv_cache.dtype
    value_dtype: KvNumbers | None = None  # `int8`, `int4`; unset = as kv_cache.dtype
    snapshots: int | None = None  # states of recurrent layers to come back to; unset = a quarter of the pool's memory
    snapshot_interval: int | None = None  # prompt tokens between two; 0: only at its end; unset = whose KV is as large

    @property
    def has_second_level(self) -> bool:
        """True if KV is to be kept outside of the pool."""
        return self._reuses_blocks and bool(self.directory or self.host_cache_bytes)

    @property
    def keeps_pool(self) -> bool:
        """True if the pool is to outlive the engine process."""
        return self.survives_engine and self._reuses_blocks

    @property
    def _reuses_blocks(self) -> bool:
        return self.enable_block_reuse and self.sharing != "none"


class SchedulerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits and policies of a step: which sequences run in it, and how many tokens of each."""

    max_batch_size: int = 64  # slots of the persistent batch
    max_num_tokens: int = 1024  # tokens of one step over all rows
    max_beam_width: int | None = None  # beams that a request may ask for; unset = 8, or max_batch_size if that is less
    policy: Policy = "guaranteed_no_evict"  # `max_utilization`: admit more, pause when full; `static_batch`: none joins
    preemption: Preemption = "recompute"  # a pause leaves KV cached until it is evicted; `swap`: on the host
    batching: Batching = "fused"  # `separate`: prompts and generation in steps of their own; `static`: in lockstep too
    enable_chunked_context: bool = True  # cut long prompts; off: longer than max_num_tokens is refused
    max_chunk_tokens: int | None = None  # tokens of one sequence in one step; unset = max_num_tokens
    max_context_tokens: int | None = None  # prompt tokens of one step; unset = 512 on a CPU, no own limit on CUDA
    mixed_context_tokens: int | None = None  # the same per waiting prompt, while others generate; unset = 128 on a CPU
    max_mixed_context_tokens: int | None = None  # the same of all prompts together; unset = 96 on a CPU without AMX
    chunking_policy: ChunkingPolicy = "first_come_first_served"  # or `equal_progress`: how long prompts share a step
    look_ahead: bool | None = None  # plan a step while the one before it runs; unset = on CUDA
    enable_batch_size_tuning: bool = False  # no more sequences at once than the pool holds of the latest ones' length
    enable_max_num_tokens_tuning: bool = False  # smaller steps while answers are longer than prompts
    tuning_requests: int = 128  # the latest ones that both are made of
    namespace_weights: tuple[str, ...] = ()  # NAMESPACE=TURNS of each round of admissions, 1 to 1000; others have 1
    max_overtakes: int = 64  # admissions after which a lower priority comes once before higher ones; 0 = never
    background_share: float | None = None  # priority 0 may make others' steps so much longer; unset = 0, on CUDA 0.05

    @property
    def weights(self) -> dict[str, int]:
        """Namespace -> turns. Raises ValueError for an entry of another form."""
        parts = (each.rpartition("=") for each in self.namespace_weights)
        return {namespace: int(turns) for namespace, _, turns in parts}


DEFAULT_BEAM_WIDTH = 8


def max_beam_width(scheduler: SchedulerConfig) -> int:
    """The widest beams that a request may ask for."""
    return scheduler.max_beam_width or min(DEFAULT_BEAM_WIDTH, scheduler.max_batch_size)


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Caps on what one request, or all waiting requests together, may ask for. Checked before any tensor is built."""

    max_queue_size: int = 2048  # requests waiting for admission
    max_queued_tokens: int = 4_000_000  # their prompt tokens
    max_words: int = 128  # stop words or bad words of one request
    max_word_tokens: int = 64  # tokens of one of them
    max_word_bytes: int = 4096  # UTF-8 bytes of all stop strings of one request together; the same for its bad words
    max_bias_bytes: int = 65_536  # UTF-8 bytes of all embedding_bias_words of one request together
    max_logit_bias: int = 4096  # entries; a dense embedding_bias is counted by its non-zero entries
    max_top_log_probs: int = 20  # alternatives of each position that a request may ask for
    max_extra_bytes: int = 16_777_216  # extra inputs of one request, for models that take such
    max_tensor_bytes: int = 50_331_648  # logits and other tensors of one response
    max_live_tensor_bytes: int = 268_435_456  # the same of all requests that run or wait, together
    max_request_batch: int = 64  # rows of one Triton request
    default_timeout_s: float = 600.0  # for requests that name none
    max_timeout_s: float = 86_400.0  # the longest one a request may ask for


class SessionsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Idle sessions kept as token ids. Their KV stays cached until the pool needs it."""

    max_sessions: int = 20_000  # beyond it the least recently used idle session is erased
    max_bytes: int = 268_435_456  # all idle sessions without their KV; beyond it the least recently used is erased
    idle_ttl_s: float = 3600.0  # an idle session older than this is erased
    directory: str = ""  # where they outlive the server; empty: in memory, where they outlive the engine process only

    def of_replica(self, index: int) -> SessionsConfig:
        return replace(self, directory=f"{self.directory}/replica-{index}") if self.directory else self


MAX_ADAPTER_NAME = 256  # characters
MAX_TOPIC = 512  # characters


class LoraSection(Struct, frozen=True, forbid_unknown_fields=True):
    """LoRA adapters that requests bring, and the two caches that hold them (docs/lora.md)."""

    enabled: bool = False  # requests may name an adapter
    max_rank: int = 64  # an adapter of a higher rank is refused
    host_bytes: int = 1_073_741_824  # memory of the adapters that are held; the least recently used are evicted first
    device_fraction: float = 0.05  # share of what weights and KV leave of a GPU; a CPU uses host_bytes
    host_module_layers: int = 0  # instead of host_bytes: so many projections of one layer, the largest at rank 1
    device_module_layers: int = 0  # the same unit for running sequences, instead of device_fraction; on a CPU too
    page_rank: int = 8  # an adapter of all projections at this rank fills one page of the caches
    host_pages_per_block: int = 24  # pages of the host's memory that are allocated at a time
    device_pages_per_block: int = 24  # pages of a GPU's memory that are allocated at a time
    put_workers: int = 1  # threads that read and check adapters, beside the one that runs steps
    ensure_workers: int = 1  # threads that bring adapters to a GPU before the step that needs them
    copy_streams: int = 1  # CUDA streams for these copies
    prefetch_dir: str = ""  # directory of folders, named by task ids, whose adapters are read at the start
    adapters: tuple[str, ...] = ()  # NAME=DIRECTORY of PEFT adapters that requests may name
    allowed_dir: str = ""  # directory below which adapters may be loaded while the server runs; empty: none are

    @property
    def directories(self) -> dict[str, str]:
        """Name -> directory of the configured adapters."""
        return {name: directory for name, _, directory in (each.partition("=") for each in self.adapters)}


class PromptAdaptersSection(Struct, frozen=True, forbid_unknown_fields=True):
    """Prompt adapters that requests may name (docs/prompt-adapters.md)."""

    adapters: tuple[str, ...] = ()  # NAME=DIRECTORY of PEFT's prompt tuning, whose rows go in front of a prompt

    @property
    def directories(self) -> dict[str, str]:
        """Name -> directory."""
        return {name: directory for name, _, directory in (each.partition("=") for each in self.adapters)}


# Inputs of a step that can be kept as debug tensors; worker/debug_tensors.py says what they hold.
DEBUG_INPUTS = (
    "input_ids",
    "position_ids",
    "sequence_length",
    "host_past_key_value_lengths",
    "slots",
    "block_tables",
)


class RecordsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Records of single steps, which an Executor keeps until its program fetches them; the oldest go first. 0 = none."""

    max_iterations: int = 0  # statistics of steps
    max_request_iterations: int = 0  # records of all live requests in a step
    max_kv_events: int = 0  # blocks that entered or left the reusable KV cache
    max_debug_iterations: int = 0  # `debug_tensors` of steps; each step may have limits.max_tensor_bytes of them
    debug_tensors: tuple[str, ...] = ()  # inputs of a step, `logits`, what `model.additional_outputs` names


class KvEventsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that say which prefixes are cached, as vLLM publishes them, for routers (docs/scale.md)."""

    endpoint: str = ""  # `tcp://*:5557`, `ipc:///PATH`, or `tcp://HOST:PORT` of a router that binds; empty: none
    replay_endpoint: str = ""  # where subscribers ask for messages that they have missed; empty: they cannot
    topic: str = ""  # the name that every message bears; llm-d expects kv@ADDRESS@MODEL
    layout: KvEventsLayout = "map"  # how an event is written: `map` as vLLM 0.33 does, `array` as its releases of 2025
    max_queue_size: int = 1000  # messages that wait to be published; more are dropped, and all blocks are listed again
    hwm: int = 10_000  # messages kept for one subscriber that does not read them; beyond it they are dropped
    buffer_steps: int = 10_000  # published messages that can be asked for again
    buffer_bytes: int = 67_108_864  # the same in bytes of all of them together
    data_parallel_rank: int = 0  # the number that each message bears; replicas count on from it

    def of_replica(self, index: int) -> KvEventsConfig:
        """For one of several replicas: ports that are bound are counted on, as vLLM does; a router's own port stays."""
        return replace(
            self,
            endpoint=endpoint_of_replica(self.endpoint, index) if is_bound(self.endpoint) else self.endpoint,
            replay_endpoint=endpoint_of_replica(self.replay_endpoint, index),
            data_parallel_rank=self.data_parallel_rank + index,
        )


class KvTransferConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts that one engine computes and another one continues (docs/scale.md)."""

    enabled: bool = False  # requests may be context_only, and may bring the state of one that was
    max_bytes: int = 50_331_648  # KV that travels with a state; of a longer prompt the other engine computes it again
    directory: str = ""  # where KV waits instead, for engines of this machine: /dev/shm/everbatch-kv; empty: nowhere
    directory_bytes: int = 1_073_741_824  # the limit of all KV that waits there; the oldest goes first
    ttl_s: float = 60.0  # seconds that it waits


class GuidedConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Guided decoding: outputs of a form that requests ask for."""

    backend: GuidedBackend = "auto"  # `llguidance`, `xgrammar` (llguidance if not installed), `none`; auto = llguidance
    tokenizer_info: str | None = None  # JSON file of encoded_vocab, tokenizer_str, stop_token_ids; unset = the model's
    max_bytes: int = 65_536  # UTF-8 bytes of one guide
    compile_timeout_s: float = 5.0  # until a guide must be compiled, the wait for others included
    compile_cpu_s: float = 0.5  # processor time that compiling one guide may take
    compile_bytes: int = 67_108_864  # memory that compiling one guide may take
    compile_processes: int = 3  # guides that are compiled at once; one namespace leaves one of them to the others
    max_compiling: int = 256  # different guides of one namespace that wait to be compiled
    cache_bytes: int = 67_108_864  # compiled guides that are kept, beside those of live requests
    live_bytes: int = 268_435_456  # compiled guides of live requests; a namespace has no more than it leaves free


class SpeculationConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Guesses at the next tokens, several of which a step verifies. They change no token, only how soon it comes."""

    mode: Speculation = "none"  # `lookup`: what followed the same tokens before; `draft_model`: a model's guesses
    draft_model: str = ""  # its checkpoint, with the model's vocabulary; like model.path
    max_draft_tokens: int = 32  # guesses for one sequence in one step
    max_shared_tokens: int = 100_000  # outputs kept to guess from, of conversations of the same namespace; 0 = none


class ImagesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Images in prompts, for models that read them (docs/images.md)."""

    max_images: int = 16  # a request has no more
    max_bytes: int = 20_971_520  # an image's file (PNG, JPEG, WebP, GIF, BMP, TIFF) is no larger
    max_pixels: int = 33_554_432  # an image has no more, before the model's processor resizes it
    cache_bytes: int = 536_870_912  # features that are held and pixels of live requests; kept from the KV pool


class WorkersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The processes that run the model (docs/scale.md)."""

    tensor_parallel_size: int = 1  # processes that share each layer of the model; CPUs only
    pipeline_parallel_size: int = 1  # stages: each has a range of the layers, and processes of its own; CPUs only
    micro_batches: int = 1  # parts of a step, on which the stages work at the same time; 1: the stages take turns
    rank_timeout_s: float = 30.0  # within a step, how long one of them may keep the others waiting
    join_address: str = ""  # HOST:PORT where ranks of other machines join, `env`: as torchrun says it; empty: none do
    replicas: int = 1  # whole engines behind one server; each request runs on one of them
    orchestrator: Orchestrator = "processes"  # replicas: on this machine, or on the nodes of a `ray` cluster
    placement: PlacementStrategy = "PACK"  # with `ray`: on few nodes, or on as many as there are (`SPREAD`)

    @property
    def has_replicas(self) -> bool:
        """True if engines stand behind a front (backend/replicas), even if there is only one."""
        return self.replicas > 1 or self.orchestrator == "ray"

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class TritonConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Behaviour of the Triton models."""

    decoupled: Decoupled = True  # false serves unary clients (ModelInfer, /infer), `both` those as NAME_unary besides
    clamp_token_ids: bool = False  # ids of a prompt beyond the vocabulary count as its last one, for load generators
    sender_threads: int = 4  # threads that hand responses to Triton; a stream stays with one
    cancellation_check_period_ms: int = 50  # how often at most Triton is asked which clients have gone
    stats_period_ms: int = 1000  # how often the metrics are brought up to date
    log_requests: bool = True  # one line in the log for each request that ended
    strict_parameters: bool = False  # unknown request parameters are refused instead of only warned about
    exclude_input_in_output: bool = False  # default of the request input of the same name
    accumulate_tokens: bool = False  # text models: each streamed response holds the whole text so far
    one_response_per_token: bool = True  # streams only; off: tokens that wait for a busy sender share a response
    stream_interval_ms: float = 0.0  # least time between two publications of stream tokens, for all streams together
    text_threads: int = 2  # threads that tokenise texts, at least 2; half as many more take those over 32 KiB
    text_timeout_s: float = 10.0  # for tokenising and rendering; a request whose text takes longer is refused
    watchdog_timeout_s: float = 60.0  # an engine or stub that is silent for so long is killed and started again
    step_timeout_s: float = 300.0  # an engine that is in one step for so long is killed and started again too
    attach_timeout_s: float = 600.0  # how long a model waits for the engine while loading, and requests for its return
    resume_requests: bool = True  # requests go on when the engine has died and is back; off: they get UNAVAILABLE
    hold_new_s: float = 10.0  # new requests wait so long for an engine that is started again; 0: they get UNAVAILABLE
    spare_engine: bool = False  # a second process waits with torch loaded (0.3 GB), and takes over when the engine dies


class TelemetryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Traces of requests for an OpenTelemetry collector (docs/tracing.md)."""

    otlp_endpoint: str = ""  # http://HOST:4318 of a collector; empty: that of OTEL_EXPORTER_OTLP_ENDPOINT, or no traces
    sample_ratio: float | None = None  # share of requests traced where the caller has not decided; unset = 1
    service_name: str = ""  # `service.name` of the traces; empty: that of OTEL_SERVICE_NAME, or everbatch


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration; each component is given only its own section."""

    model: ModelConfigSection = ModelConfigSection()
    kv_cache: KvCacheConfig = KvCacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    limits: LimitsConfig = LimitsConfig()
    sessions: SessionsConfig = SessionsConfig()
    records: RecordsConfig = RecordsConfig()
    kv_events: KvEventsConfig = KvEventsConfig()
    kv_transfer: KvTransferConfig = KvTransferConfig()
    guided: GuidedConfig = GuidedConfig()
    lora: LoraSection = LoraSection()
    prompt_adapters: PromptAdaptersSection = PromptAdaptersSection()
    speculation: SpeculationConfig = SpeculationConfig()
    images: ImagesConfig = ImagesConfig()
    workers: WorkersConfig = WorkersConfig()
    triton: TritonConfig = TritonConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
