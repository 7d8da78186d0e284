"""What section B of docs/features.md says of each class, once more: arguments, defaults, which attributes are fixed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from compat import trtllm

NONE = None


class Facts(NamedTuple):
    """`arguments`: values other than the defaults, in the order of the constructor.

    The first `num_positional` may be given by position, the first `num_required` must be given.
    """

    cls: type
    arguments: dict[str, Any]
    defaults: dict[str, Any]
    num_positional: int
    num_required: int = 0
    read_only: bool = False
    dynamic: bool = False


SEVEN = timedelta(milliseconds=7)
TABLE = torch.ones(3, 4)


def _range(*values: Any) -> Any:
    return trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig(*values)


GUIDE = trtllm.GuidedDecodingParams.GuideType

SAMPLING = {
    "top_k": 2,
    "top_p": 0.5,
    "top_p_min": 0.25,
    "top_p_reset_ids": 3,
    "top_p_decay": 0.75,
    "seed": 7,
    "temperature": 1.5,
    "min_tokens": 4,
    "beam_search_diversity_rate": 0.5,
    "repetition_penalty": 1.25,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.75,
    "length_penalty": 2.0,
    "early_stopping": 5,
    "no_repeat_ngram_size": 6,
    "num_return_sequences": 2,
    "min_p": 0.125,
    "beam_width_array": [2, 3],
}
REQUEST = {
    "streaming": True,
    "sampling_config": trtllm.SamplingConfig(2),
    "output_config": trtllm.OutputConfig(True),
    "end_id": -1,
    "pad_id": -2,
    "position_ids": [0, 1],
    "bad_words": [[4, 5, 6]],
    "stop_words": [[7, 8, 9]],
    "embedding_bias": torch.ones(1),
    "external_draft_tokens_config": trtllm.ExternalDraftTokensConfig([1, 2, 3]),
    "prompt_tuning_config": trtllm.PromptTuningConfig(TABLE),
    "multimodal_input": trtllm.MultimodalInput([[1]], [2], [3]),
    "multimodal_embedding": TABLE,
    "mrope_config": trtllm.MropeConfig(TABLE, 3),
    "lora_config": trtllm.LoraConfig(1),
    "lookahead_config": trtllm.LookaheadDecodingConfig(3, 5, 7),
    "kv_cache_retention_config": trtllm.KvCacheRetentionConfig([_range(0, 2, 30)], 80),
    "logits_post_processor_name": "mine",
    "logits_post_processor": print,
    "encoder_input_token_ids": [1],
    "client_id": 1 << 63,
    "return_all_generated_tokens": True,
    "priority": 0.25,
    "type": trtllm.RequestType.REQUEST_TYPE_CONTEXT_ONLY,
    "context_phase_params": trtllm.ContextPhaseParams([1, 2], 123, b"\0\1", [10]),
    "encoder_input_features": TABLE,
    "encoder_output_length": 3,
    "cross_attention_mask": TABLE,
    "num_return_sequences": 3,
    "eagle_config": trtllm.EagleConfig([[0]]),
    "skip_cross_attn_blocks": TABLE,
    "guided_decoding_params": trtllm.GuidedDecodingParams(GUIDE.JSON),
    "language_adapter_uid": 1,
    "allotted_time_ms": SEVEN,
    "cache_salt_id": 9,
}
REQUEST_DEFAULTS = dict.fromkeys(REQUEST) | {
    "streaming": False,
    "sampling_config": trtllm.SamplingConfig(),
    "output_config": trtllm.OutputConfig(),
    "return_all_generated_tokens": False,
    "priority": 0.5,
    "type": trtllm.RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION,
    "num_return_sequences": 1,
}
OUTPUT = {
    "return_log_probs": True,
    "return_context_logits": True,
    "return_generation_logits": True,
    "exclude_input_from_output": True,
    "return_encoder_output": True,
    "return_perf_metrics": True,
    "additional_model_outputs": [trtllm.AdditionalModelOutput("topKLogits", True)],
}

REQUEST_SIDE = [
    Facts(
        trtllm.Request,
        {"input_token_ids": [1, 2], "max_tokens": 5} | REQUEST,
        REQUEST_DEFAULTS,
        2,
        num_required=2,
        dynamic=True,
    ),
    Facts(trtllm.SamplingConfig, {"beam_width": 4} | SAMPLING, {"beam_width": 1} | dict.fromkeys(SAMPLING), 1),
    Facts(trtllm.OutputConfig, OUTPUT, dict.fromkeys(OUTPUT, False) | {"additional_model_outputs": None}, 7),
    Facts(
        trtllm.AdditionalModelOutput,
        {"name": "x", "gather_context": True},
        {"gather_context": False},
        2,
        num_required=1,
    ),
    Facts(
        trtllm.ExternalDraftTokensConfig,
        {"tokens": [1, 2], "logits": TABLE, "acceptance_threshold": 1.0, "fast_logits": False},
        {"logits": NONE, "acceptance_threshold": NONE, "fast_logits": NONE},
        4,
        num_required=1,
        read_only=True,
    ),
    Facts(
        trtllm.PromptTuningConfig,
        {"embedding_table": TABLE, "input_token_extra_ids": [1, 2]},
        {"input_token_extra_ids": NONE},
        2,
        num_required=1,
        read_only=True,
    ),
    Facts(
        trtllm.LoraConfig,
        {"task_id": 2, "weights": TABLE, "config": torch.ones(1, 2, dtype=torch.int32)},
        {"weights": NONE, "config": NONE},
        3,
        num_required=1,
        read_only=True,
    ),
    Facts(
        trtllm.MultimodalInput,
        {"multimodal_hashes": [[1, 2]], "multimodal_positions": [3], "multimodal_lengths": [4]},
        {},
        3,
        num_required=3,
        read_only=True,
    ),
    Facts(
        trtllm.MropeConfig,
        {"mrope_rotary_cos_sin": TABLE, "mrope_position_deltas": -50},
        {},
        2,
        num_required=2,
        read_only=True,
    ),
    Facts(
        trtllm.LookaheadDecodingConfig,
        {"max_window_size": 3, "max_ngram_size": 5, "max_verification_set_size": 7},
        {"max_window_size": 4, "max_ngram_size": 3, "max_verification_set_size": 4},
        3,
        read_only=True,
    ),
    Facts(
        trtllm.EagleConfig,
        {
            "eagle_choices": [[0, 0], [0, 1]],
            "greedy_sampling": False,
            "posterior_threshold": 0.5,
            "use_dynamic_tree": True,
            "dynamic_tree_max_topK": 3,
        },
        {
            "eagle_choices": NONE,
            "greedy_sampling": True,
            "posterior_threshold": NONE,
            "use_dynamic_tree": False,
            "dynamic_tree_max_topK": NONE,
        },
        5,
        read_only=True,
    ),
    Facts(
        trtllm.KvCacheRetentionConfig,
        {
            "token_range_retention_configs": [_range(0, 2, 30, SEVEN)],
            "decode_retention_priority": 80,
            "decode_duration_ms": SEVEN,
            "transfer_mode": trtllm.KvCacheTransferMode.GDS,
            "directory": "somewhere",
        },
        {
            "decode_retention_priority": 35,
            "decode_duration_ms": NONE,
            "transfer_mode": trtllm.KvCacheTransferMode.DRAM,
            "directory": NONE,
        },
        5,
        num_required=1,
        read_only=True,
    ),
    Facts(
        trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig,
        {"token_start": 0, "token_end": 17, "priority": 100, "duration_ms": SEVEN},
        {"duration_ms": NONE},
        4,
        num_required=3,
        read_only=True,
    ),
    Facts(
        trtllm.ContextPhaseParams,
        {"first_gen_tokens": [1, 2], "req_id": 123, "opaque_state": b"\0\1", "draft_tokens": [10, 20]},
        {"opaque_state": NONE, "draft_tokens": NONE},
        4,
        num_required=2,
        read_only=True,
    ),
    Facts(
        trtllm.GuidedDecodingParams,
        {"guide_type": GUIDE.JSON, "guide": "{}"},
        {"guide": NONE},
        2,
        num_required=1,
        read_only=True,
    ),
]

# class -> what its attributes are before anything has been set; all can be set
RESULTS: dict[Callable[[], Any], dict[str, Any]] = {
    trtllm.Result: {
        "is_final": False,
        "cum_log_probs": NONE,
        "log_probs": NONE,
        "context_logits": NONE,
        "generation_logits": NONE,
        "spec_dec_fast_logits_info": NONE,
        "encoder_output": NONE,
        "sequence_index": 0,
        "is_sequence_final": False,
        "decoding_iter": 0,
        "avg_decoded_tokens_per_iter": NONE,
        "context_phase_params": NONE,
        "request_perf_metrics": NONE,
        "output_token_ids": [],
        "finish_reasons": [],
        "additional_outputs": [],
    },
    trtllm.RequestPerfMetrics: {
        "timing_metrics": trtllm.TimingMetrics(),
        "kv_cache_metrics": trtllm.KvCacheMetrics(),
        "speculative_decoding": trtllm.SpeculativeDecodingMetrics(),
        "first_iter": NONE,
        "last_iter": NONE,
        "iter": NONE,
    },
    trtllm.TimingMetrics: dict.fromkeys(
        (
            "arrival_time",
            "first_scheduled_time",
            "first_token_time",
            "last_token_time",
            "kv_cache_transfer_start",
            "kv_cache_transfer_end",
        ),
        timedelta(),
    )
    | {"kv_cache_size": 0},
    trtllm.KvCacheMetrics: dict.fromkeys(
        ("num_total_allocated_blocks", "num_new_allocated_blocks", "num_reused_blocks", "num_missed_blocks"), 0
    )
    | {"kv_cache_hit_rate": 0.0},
    trtllm.SpeculativeDecodingMetrics: {
        "acceptance_rate": 0.0,
        "total_accepted_draft_tokens": 0,
        "total_draft_tokens": 0,
    },
}
