"""The configuration classes of TensorRT-LLM's LLM API (`tensorrt_llm.llmapi`), under their names and with their fields.

What becomes of each field says the table of parameters.py; `docs/parameters.md` is written from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from compat.config_object import ConfigObject
from compat.llm.config_enums import CapacitySchedulerPolicy, KvCacheTransferMode, QuantAlgo
from compat.llm.errors import NotHere


class DynamicBatchConfig(ConfigObject):
    """Limits of the batch that follow the latest requests."""

    argument = "scheduler_config.dynamic_batch_config"

    enable_batch_size_tuning: bool = True
    enable_max_num_tokens_tuning: bool = False
    dynamic_batch_moving_average_window: int = 128


class SchedulerConfig(ConfigObject):
    """The policies that admit requests and cut long prompts."""

    argument = "scheduler_config"

    capacity_scheduler_policy: str = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: str | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None


class KvCacheConfig(ConfigObject):
    """Size and behaviour of the KV cache. `max_attention_window`: tokens, a number for layer after layer."""

    argument = "kv_cache_config"

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: int = 32


class PeftCacheConfig(ConfigObject):
    """Sizes of the caches of LoRA weights."""

    argument = "peft_cache_config"

    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float = 0.02
    host_cache_size: int = 1 << 30
    lora_prefetch_dir: str | None = None


class LoraConfig(ConfigObject):
    """Which adapters requests may bring."""

    argument = "lora_config"

    lora_dir: list[str] = []
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = []
    trtllm_modules_to_hf_modules: dict[str, str] = {}
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    swap_gate_up_proj_lora_b_weight: bool = True


class CudaGraphConfig(ConfigObject):
    """Replay steps that only generate as CUDA graphs."""

    argument = "cuda_graph_config"

    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


class TorchCompileConfig(ConfigObject):
    """Settings of torch.compile, which is not used here."""

    argument = "torch_compile_config"

    enable_fullgraph: bool = True
    enable_inductor: bool = False
    enable_piecewise_cuda_graph: bool = False
    capture_num_tokens: list[int] | None = None
    enable_userbuffers: bool = True
    max_num_streams: int = 1


class MoeConfig(ConfigObject):
    """Which kernels run a mixture of experts."""

    argument = "moe_config"

    backend: str = "CUTLASS"
    max_num_tokens: int | None = None
    load_balancer: Any = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class AttentionDpConfig(ConfigObject):
    argument = "attention_dp_config"
    refused = "each request is served by one engine; use engine_config with workers.replicas"

    enable_balance: bool = False
    timeout_iters: int = 50
    batching_wait_iters: int = 10


class ExtendedRuntimePerfKnobConfig(ConfigObject):
    """Knobs that change speed only."""

    argument = "extended_runtime_perf_knob_config"

    multi_block_mode: bool = True
    enable_context_fmha_fp32_acc: bool = False
    cuda_graph_mode: bool = False
    cuda_graph_cache_size: int = 0


class CacheTransceiverConfig(ConfigObject):
    """KV travels with `disaggregated_params`."""

    argument = "cache_transceiver_config"

    backend: str | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None
    kv_transfer_sender_future_timeout_ms: int | None = None


class QuantConfig(ConfigObject):
    """How the weights of a float checkpoint are quantised while they are loaded."""

    argument = "quant_config"

    quant_algo: QuantAlgo | None = None
    kv_cache_quant_algo: QuantAlgo | None = None
    group_size: int = 128
    smoothquant_val: float = 0.5
    clamp_val: list[float] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: list[str] | None = None
    mamba_ssm_cache_dtype: str | None = None


class CalibConfig(ConfigObject):
    argument = "calib_config"
    refused = (
        "nothing is calibrated while a model loads; use ./everbatch quantize --calibration FILE (docs/quantisation.md)"
    )

    device: str = "cuda"
    calib_dataset: str = "cnn_dailymail"
    calib_batches: int = 512
    calib_batch_size: int = 1
    calib_max_seq_length: int = 512
    random_seed: int = 1234
    tokenizer_max_seq_length: int = 2048


class BuildConfig(ConfigObject):
    """Limits that TensorRT-LLM fixes when an engine is built, and that are settings of the program here."""

    argument = "build_config"

    max_input_len: int = 1024
    max_seq_len: int | None = None
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    opt_batch_size: int = 8
    opt_num_tokens: int | None = None
    max_prompt_embedding_table_size: int = 0
    kv_cache_type: str | None = None
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    strongly_typed: bool = True
    force_num_profiles: int | None = None
    profiling_verbosity: str = "layer_names_only"
    enable_debug_output: bool = False
    max_draft_len: int = 0
    speculative_decoding_mode: Any = None
    use_refit: bool = False
    input_timing_cache: str | None = None
    output_timing_cache: str = "model.cache"
    lora_config: LoraConfig | None = None
    weight_sparsity: bool = False
    weight_streaming: bool = False
    plugin_config: Any = None
    use_strip_plan: bool = False
    max_encoder_input_len: int = 1024
    dry_run: bool = False
    visualize_network: str | None = None
    monitor_memory: bool = False
    use_mrope: bool = False


class DecodingBaseConfig(ConfigObject):
    """Fields that all kinds of speculative decoding have. `max_draft_len`: guesses for a sequence in a step."""

    argument = "speculative_config"
    decoding_type: ClassVar[str] = ""
    max_draft_len: int | None = None
    speculative_model_dir: Any = None
    max_concurrency: int | None = None
    load_format: str | None = None


class NGramDecodingConfig(DecodingBaseConfig):
    """Guesses are what followed the same tokens before."""

    decoding_type = "NGram"
    max_matching_ngram_size: int = 0
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True


class LookaheadDecodingConfig(DecodingBaseConfig):
    """Served by lookup: its n-gram size less one is the number of guesses."""

    decoding_type = "Lookahead"
    max_window_size: int = 4
    max_ngram_size: int = 3
    max_verification_set_size: int = 4


class DraftTargetDecodingConfig(DecodingBaseConfig):
    """Guesses are those of a small model, `speculative_model_dir`."""

    decoding_type = "Draft_Target"


class AutoDecodingConfig(DecodingBaseConfig):
    """Served by lookup."""

    decoding_type = "AUTO"


_NO_HEADS = "guesses come from lookup or from a draft model; use NGramDecodingConfig or DraftTargetDecodingConfig"


class MedusaDecodingConfig(DecodingBaseConfig):
    refused, decoding_type = _NO_HEADS, "Medusa"

    medusa_choices: list[list[int]] | None = None
    num_medusa_heads: int | None = None


class EagleDecodingConfig(DecodingBaseConfig):
    refused, decoding_type = _NO_HEADS, "Eagle"

    eagle_choices: list[list[int]] | None = None
    greedy_sampling: bool = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None
    num_eagle_layers: int | None = None
    max_non_leaves_per_layer: int | None = None
    eagle3_one_model: bool = True
    eagle3_layers_to_capture: Any = None


class MTPDecodingConfig(DecodingBaseConfig):
    refused, decoding_type = _NO_HEADS, "MTP"

    num_nextn_predict_layers: int = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    num_nextn_predict_layers_from_model_config: int = 1


class UserProvidedDecodingConfig(DecodingBaseConfig):
    refused, decoding_type = _NO_HEADS, "User_Provided"

    drafter: Any = None
    resource_manager: Any = None


class SaveHiddenStatesDecodingConfig(DecodingBaseConfig):
    refused = "hidden states are outputs of a request; use SamplingParams(additional_model_outputs=...)"
    decoding_type = "SaveState"

    output_directory: Any = None
    write_interval: int = 20
    file_prefix: str = "data"
    eagle3_layers_to_capture: Any = None


@dataclass(frozen=True)
class KvCacheRetentionConfig:
    """How long the KV of a request outlives that of others. Priorities are 0 to 100, times are timedeltas or milliseconds."""

    @dataclass(frozen=True)
    class TokenRangeRetentionConfig:
        token_start: int
        token_end: int | None = None
        priority: int = 35
        duration_ms: timedelta | float | None = None

    token_range_retention_configs: list[TokenRangeRetentionConfig]
    decode_retention_priority: int = 35
    decode_duration_ms: timedelta | float | None = None
    transfer_mode: KvCacheTransferMode = KvCacheTransferMode.DRAM
    directory: str | None = None

    def __post_init__(self) -> None:
        """Raises NotHere for a transfer to a file."""
        if self.transfer_mode != KvCacheTransferMode.DRAM or self.directory:
            raise NotHere(
                "transfer_mode and directory send retained KV to a file, which this version does not; leave them out, and "
                "set kv_cache.directory in an engine_config (docs/second-level.md)"
            )


class MpiCommSession:
    """Refused: no process of this project is started by MPI from within a program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotHere(
            "MpiCommSession: ranks are started by this project itself; leave mpi_session out and set "
            "tensor_parallel_size, or start the program with torchrun (docs/scale.md)"
        )
