"""LMDeploy's configuration classes, with its field names and defaults. tables.py says what becomes of each field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compat.config_object import ConfigObject


class EngineConfigBase(ConfigObject):
    """Fields of both engines. `cache_max_entry_count`: the share of the free memory that the KV cache takes."""

    dtype: str = "auto"
    tp: int = 1
    dp: int = 1
    session_len: int | None = None
    max_batch_size: int | None = None
    cache_max_entry_count: float = 0.8
    enable_prefix_caching: bool = False
    quant_policy: int = 0
    max_prefill_token_num: int = 8192
    model_format: str | None = None
    download_dir: str | None = None
    revision: str | None = None
    empty_init: bool = False
    enable_metrics: bool = True
    hf_overrides: dict[str, Any] | None = None


class TurbomindEngineConfig(EngineConfigBase):
    cache_chunk_size: int = -1
    cache_block_seq_len: int = 64
    rope_scaling_factor: float = 0.0
    use_logn_attn: bool = False
    num_tokens_per_iter: int = 0
    max_prefill_iters: int = 1
    devices: list[int] | None = None
    device_num: int | None = None
    communicator: str = "nccl"
    async_: int = 1
    attn_tp_size: int | None = None
    attn_dp_size: int | None = None
    mlp_tp_size: int | None = None
    mlp_dp_size: int | None = None
    outer_dp_size: int | None = None
    nnodes: int = 1
    node_rank: int = 0


class PytorchEngineConfig(EngineConfigBase):
    block_size: int = 64
    adapters: dict[str, str] | None = None
    eager_mode: bool = False
    device_type: str = "cuda"
    num_cpu_blocks: int = 0
    num_gpu_blocks: int = 0
    prefill_interval: int = 16
    thread_safe: bool = False
    custom_module_map: str | None = None
    distributed_executor_backend: str | None = None
    dp_rank: int = 0
    ep: int = 1
    enable_microbatch: bool = False
    enable_eplb: bool = False
    enable_mp_engine: bool = False
    mp_engine_backend: str = "mp"
    disable_vision_encoder: bool = False


class GenerationConfig(ConfigObject):
    """How an answer is generated. Without `do_sample` it is always the most likely token.

    `stop_words` and `bad_words` are texts; a stop word is no part of the answer. `response_format`: {"type": "json_schema",
    "json_schema": {...}}, {"type": "regex_schema", "regex_schema": "..."} or {"type": "json_object"}.
    """

    n: int = 1
    max_new_tokens: int = 512
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int | None = None
    stop_words: list[str] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    output_logits: str | None = None
    output_last_hidden_state: str | None = None
    logits_processors: list[Callable[..., Any]] | None = None
    with_cache: bool = False
    preserve_cache: bool = False
    migration_request: Any = None


class ChatTemplateConfig(ConfigObject):
    """A chat template made of texts around each message, in place of the model's own.

    A conversation is `system` instruction `eosys`, then `user` text `eoh` and `assistant` text `eoa` `separator` for each turn.
    With `meta_instruction` alone the model's own template holds, and conversations without a system message get this one.
    `capability` "completion" applies no template. `model_name` has no effect: the template is not looked up by a name.
    """

    model_name: str | None = None
    system: str | None = None
    meta_instruction: str | None = None
    eosys: str | None = None
    user: str | None = None
    eoh: str | None = None
    assistant: str | None = None
    eoa: str | None = None
    tool: str | None = None
    eotool: str | None = None
    separator: str | None = None
    capability: str | None = None
    stop_words: list[str] | None = None
