"""The keyword arguments of LLM, with TensorRT-LLM's names, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from backend.api.config.schema import ChunkingPolicy, Policy
from backend.api.foreign import ForeignTable, honoured, no_effect, refused
from compat.llm.upstream_parameters import PYTORCH, SPECULATION, TENSORRT
from compat.tensorrt_llm import DYNAMIC_BATCH, KV_CACHE, PEFT_CACHE

KEPT = 1000  # iterations whose records are kept, where only a flag asks for records


def _one_of(*choices: str) -> Callable[[Any], str | None]:
    """Read a choice: its name in any case, or a member of an enumeration. None sets nothing."""

    def convert(given: Any) -> str | None:
        name = None if given is None else str(getattr(given, "name", given)).rpartition(".")[2].lower()
        if name is not None and name not in choices:
            raise ValueError(f"{' or '.join(map(str.upper, choices))} is expected")
        return name

    return convert


def _records(wanted: bool | None) -> int | None:
    return KEPT if wanted else None


ARGUMENTS = ForeignTable(
    "{} of LLM",
    # In front: of two parameters with one target the later one wins.
    *TENSORRT,
    *PYTORCH,
    honoured("model", note="a directory, a GGUF file or a hub id"),
    honoured("tokenizer", note="a directory, a GGUF file or a tokenizer"),
    honoured("skip_tokenizer_init", note="True: no tokenizer, so prompts and outputs are token ids"),
    honoured("dtype", "model.dtype"),
    honoured(
        "tensor_parallel_size",
        "workers.tensor_parallel_size",
        "processes on CPUs of one machine, or of a Ray cluster (docs/scale.md)",
    ),
    honoured(
        "pipeline_parallel_size",
        "workers.pipeline_parallel_size",
        "stages on CPUs of one machine, or of a Ray cluster (docs/scale.md)",
    ),
    honoured("max_seq_len", "model.max_seq_len"),
    honoured("max_batch_size", "scheduler.max_batch_size"),
    honoured("max_num_tokens", "scheduler.max_num_tokens"),
    honoured("max_beam_width", "scheduler.max_beam_width", "also the limit of each request"),
    honoured("max_input_len", note="the limit of each request"),
    honoured("enable_chunked_prefill", "scheduler.enable_chunked_context"),
    honoured("disable_overlap_scheduler", "scheduler.look_ahead", convert=lambda off: False if off else None),
    honoured("guided_decoding_backend", "guided.backend"),
    honoured("speculative_config", note="sets `speculation.*`"),
    *SPECULATION,
    # The numbers follow the flags, which have the same targets.
    honoured("enable_iter_perf_stats", "records.max_iterations", f"{KEPT} iterations", _records),
    honoured("enable_iter_req_stats", "records.max_request_iterations", f"{KEPT} iterations", _records),
    honoured("iter_stats_max_iterations", "records.max_iterations"),
    honoured("request_stats_max_iterations", "records.max_request_iterations"),
    honoured("stream_interval", note="tokens of a sequence between two steps of a stream"),
    honoured("num_postprocess_workers", note="processes that detokenise"),
    honoured("postprocess_tokenizer_dir", note="the tokenizer of those processes"),
    honoured("batched_logits_processor", note="for the requests that ask for it"),
    *no_effect("requests may ask for logits in any case", "gather_generation_logits"),
    honoured("return_perf_metrics", note="every output has `request_perf_metrics`"),
    honoured("enable_tqdm", note="a spinner while the model loads"),
    honoured("orchestrator_type", note="`rpc`: the engine is a process of its own; `ray`: an actor of a Ray cluster"),
    honoured("engine_config", note="the `EngineConfig` that the other arguments change"),
    *no_effect(
        "requests may bring a PromptAdapterRequest in any case; `limits.max_extra_bytes` bounds its rows",
        *("enable_prompt_adapter", "max_prompt_adapter_token"),
    ),
    honoured("enable_lora", "lora.enabled", convert=lambda wanted: True if wanted else None),
    honoured("lora_config", "lora.enabled", convert=lambda config: None if config is None else True),
    honoured("peft_cache_config", note="its fields follow; others have no effect"),
    *PEFT_CACHE,
    honoured("lora_config.max_lora_rank", "lora.max_rank"),
    *no_effect(
        "an adapter says it itself, and its memory is bounded by `lora.host_bytes`",
        *(
            f"lora_config.{field}"
            for field in (
                *("lora_dir", "lora_ckpt_source", "lora_target_modules", "trtllm_modules_to_hf_modules"),
                *("max_loras", "max_cpu_loras", "swap_gate_up_proj_lora_b_weight"),
            )
        ),
    ),
    honoured(
        "cache_transceiver_config",
        "kv_transfer.enabled",
        "KV travels with `disaggregated_params`",
        convert=lambda config: None if config is None else True,
    ),
    *no_effect(
        "see `kv_transfer.*` of an `engine_config`",
        *(
            f"cache_transceiver_config.{field}"
            for field in ("backend", "max_tokens_in_buffer", "kv_transfer_timeout_ms")
        ),
        "cache_transceiver_config.kv_transfer_sender_future_timeout_ms",
    ),
    honoured("scheduler_config", note="its fields follow"),
    honoured("scheduler_config.capacity_scheduler_policy", "scheduler.policy", convert=_one_of(*get_args(Policy))),
    honoured(
        "scheduler_config.context_chunking_policy",
        "scheduler.chunking_policy",
        convert=_one_of(*get_args(ChunkingPolicy)),
    ),
    honoured("scheduler_config.dynamic_batch_config", note="its fields follow"),
    *DYNAMIC_BATCH,
    honoured("kv_cache_config", note="its fields follow"),
    *KV_CACHE,
    honoured("kv_cache_config.dtype", "kv_cache.dtype"),
    honoured("kv_cache_config.tokens_per_block", "kv_cache.block_size"),
    honoured("kv_cache_config.max_attention_window", "kv_cache.max_attention_window"),
    honoured("kv_cache_config.event_buffer_max_size", "records.max_kv_events", convert=lambda size: size or None),
    *refused("only transformers are served", "kv_cache_config.mamba_ssm_cache_dtype", neutral=("auto",)),
    *refused("a block that matches in part is always copied", "kv_cache_config.copy_on_partial_reuse", neutral=(True,)),
    *refused("the model runs on one device", "kv_cache_config.attention_dp_events_gather_period_ms", neutral=(5,)),
    *refused("each rank has a part of all tokens", "context_parallel_size", neutral=(1,)),
    *refused("the fast tokenizer is the only one", "tokenizer_mode", neutral=("auto",)),
    *refused("no code of a checkpoint is run", "trust_remote_code"),
    *refused("a directory holds one revision; give that of the revision", "revision", "tokenizer_revision"),
    *refused("a request never waits for others", "batch_wait_timeout_ms", neutral=(0,)),
)
# arguments whose value is an object or a dictionary with fields, of which some are in the table
SECTIONS = {parameter.key.rpartition(".")[0] for parameter in ARGUMENTS if "." in parameter.key}
OPEN = ("peft_cache_config", "lora_config", "cache_transceiver_config")  # sections that may have fields without effect
