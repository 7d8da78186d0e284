"""The tensors of tensorrt_llm, ensemble and tensorrt_llm_bls.

Names, types and meaning follow tensorrtllm_backend (v0.5 to v0.21); START, END, STOP, CORRID, step and session_len
follow LMDeploy's TurboMind backend; messages, top_log_probs and lora_name are this project's own.
"""

from __future__ import annotations

from backend.serving.tensors import ANY, ONE, Input, ModelTensors, Output, ignored, refused, sampling_inputs

_RETURNS = (
    Input("return_log_probs", "BOOL", ONE, "output.return_log_probs"),
    Input("top_log_probs", "INT32", ONE, "output.top_log_probs"),  # 0 to limits.max_top_log_probs
    Input("return_context_logits", "BOOL", ONE, "output.return_context_logits"),
    Input("return_generation_logits", "BOOL", ONE, "output.return_generation_logits"),
    Input("return_perf_metrics", "BOOL", ONE, "output.return_perf_metrics"),
    Input("return_kv_cache_reuse_stats", "BOOL", ONE, "output.return_perf_metrics"),  # its name until v0.18
    Input("return_num_input_tokens", "BOOL", ONE, "request"),
    Input("return_num_output_tokens", "BOOL", ONE, "request"),
    Input("exclude_input_in_output", "BOOL", ONE, "request"),
)

# Without CORRID a request has no session. With it START and END default to 1 (to 0 with STOP), and STOP to 0.
_SESSION = (
    Input("CORRID", "UINT64", ONE, "session.id"),
    Input("START", "INT32", ONE, "session.start"),
    Input("END", "INT32", ONE, "session.end"),
    Input("STOP", "INT32", ONE, "request"),
    Input("step", "INT32", ONE, "session.step"),
    Input("session_len", "INT32", ONE, "session.session_len"),
    Input("session_full_history", "BOOL", ONE, "session.full_history"),
)

_PAD_ID = ignored(("pad_id", "INT32", ONE), why="shorter beams are padded with -1")
_EXTRA_IDS = "KV is shared only between requests with equal tables"

_PROMPT_TUNING = (
    Input("prompt_embedding_table", "FP16", (-1, -1), "request"),
    *ignored(("prompt_vocab_size", "INT32", ONE), why="the table's own rows count"),
)

_LORA = (
    Input("lora_task_id", "UINT64", ONE, "request"),  # 0 without weights: no adapter
    Input("lora_weights", "FP16", (-1, -1), "request"),
    Input("lora_config", "INT32", (-1, 3), "request"),
    Input("lora_name", "STRING", ONE, "request"),  # a name of lora.adapters, instead of the three inputs above
)

_GUIDE = (
    Input("guided_decoding_guide_type", "STRING", ONE, "request"),
    Input("guided_decoding_guide", "STRING", ONE, "request"),
)

_ENGINE_ONLY_NOT_BUILT = (
    Input("draft_input_ids", "INT32", ANY, "request"),
    *refused("logits of draft tokens", ("draft_logits", "FP32", (-1, -1))),
    *refused("logits of draft tokens", ("draft_acceptance_threshold", "FP32", ONE), neutral=(0.0,)),
    *ignored(
        ("decoder_input_ids", "INT32", ANY),
        ("decoder_input_lengths", "INT32", ONE),
        why="clients forward what preprocessing always gives, a pad id; this model has no encoder",
    ),
    *refused(
        "encoder input",
        ("encoder_input_features", "FP16", (-1, -1)),
        ("cross_attention_mask", "BOOL", (-1, -1)),
        ("mrope_rotary_cos_sin", "FP32", ANY),
    ),
    *refused(
        "encoder input", ("encoder_output_lengths", "INT32", ONE), ("mrope_position_deltas", "INT64", ONE), neutral=(0,)
    ),
    *refused("encoder input", ("skip_cross_attn_blocks", "BOOL", ONE), neutral=(False,)),
    Input("context_phase_params", "UINT8", ANY, "request"),  # with request_type=generation_only
    Input("lookahead_window_size", "INT32", ONE, "request"),
    Input("lookahead_ngram_size", "INT32", ONE, "request"),
    Input("lookahead_verification_set_size", "INT32", ONE, "request"),
)

_RETENTION = (
    Input("retention_token_range_starts", "INT32", ANY, "request"),
    Input("retention_token_range_ends", "INT32", ANY, "request"),
    Input("retention_token_range_priorities", "INT32", ANY, "request"),
    Input("retention_token_range_durations_ms", "INT32", ANY, "request"),
    Input("retention_decode_priority", "INT32", ONE, "request"),
    Input("retention_decode_duration_ms", "INT32", ONE, "request"),
)

# The output so far of each sequence of a stream whose server has ended: rows padded with -1, like `output_ids`.
_RESUME = (
    Input("resume_output_ids", "INT32", (-1, -1), "request"),
    Input("resume_log_probs", "FP32", (-1, -1), "request"),  # their `output_log_probs`, with return_log_probs
    Input("resume_ended", "BOOL", ANY, "request"),  # sequences whose end has come; without it none
)

_PERF_OUTPUTS = tuple(
    Output(name, dtype, ONE, "return_perf_metrics")
    for name, dtype in (
        ("kv_cache_alloc_new_blocks", "INT32"),
        ("kv_cache_reused_blocks", "INT32"),
        ("kv_cache_alloc_total_blocks", "INT32"),
        ("arrival_time_ns", "INT64"),
        ("first_scheduled_time_ns", "INT64"),
        ("first_token_time_ns", "INT64"),
        ("last_token_time_ns", "INT64"),
        ("acceptance_rate", "FP32"),
        ("total_accepted_draft_tokens", "INT32"),
        ("total_draft_tokens", "INT32"),
        ("num_cached_tokens", "INT32"),
        ("num_context_tokens", "INT32"),
        ("num_recomputed_tokens", "INT32"),
    )
)

_COMMON_OUTPUTS = (
    Output("cum_log_probs", "FP32", ANY, "return_log_probs"),
    Output("output_log_probs", "FP32", (-1, -1), "return_log_probs"),
    Output("top_log_probs_ids", "INT32", (-1, -1), "top_log_probs: [new tokens, n], the most likely first"),
    Output("top_log_probs", "FP32", (-1, -1), "top_log_probs: their log-probabilities"),
    Output("context_logits", "FP32", (-1, -1), "return_context_logits"),
    Output("generation_logits", "FP32", (-1, -1, -1), "return_generation_logits"),
    Output("batch_index", "INT32", ONE, "a request of more than one row"),
    Output("sequence_index", "INT32", ONE, "num_return_sequences more than 1"),
    Output("num_input_tokens", "INT32", ONE, "return_num_input_tokens"),
    Output("num_output_tokens", "INT32", ONE, "return_num_output_tokens"),
    *_PERF_OUTPUTS,
)

TOKEN_MODEL = ModelTensors(
    "tensorrt_llm",
    inputs=(
        Input("input_ids", "INT32", ANY, "request", optional=False),
        Input("input_lengths", "INT32", ONE, "request", optional=False),
        Input("request_output_len", "INT32", ONE, "request", optional=False),
        Input("end_id", "INT32", ONE, "request"),
        *_PAD_ID,
        Input("stop_words_list", "INT32", (2, -1), "request"),
        Input("bad_words_list", "INT32", (2, -1), "request"),
        Input("embedding_bias", "FP32", ANY, "request"),
        *sampling_inputs("tensorrt_llm"),
        *_RETURNS,
        Input("stop", "BOOL", ONE, "request"),
        Input("streaming", "BOOL", ONE, "request"),
        *_SESSION,
        *_RETENTION,
        *_RESUME,
        *_PROMPT_TUNING,
        *ignored(("prompt_table_extra_ids", "UINT64", ANY), why=_EXTRA_IDS),
        *_LORA,
        *_GUIDE,
        *_ENGINE_ONLY_NOT_BUILT,
    ),
    outputs=(
        Output("output_ids", "INT32", (-1, -1), "always"),
        Output("sequence_length", "INT32", ANY, "always"),
        *_COMMON_OUTPUTS,
        Output("context_phase_params", "UINT8", ANY, "request_type=context_only"),
    ),
)

_TEXT_INPUTS = (
    Input("text_input", "STRING", ONE, "request", optional=False),  # empty if there are messages
    Input("messages", "STRING", ONE, "request"),
    Input("max_tokens", "INT32", ONE, "request", optional=False),
    *refused("encoder input", ("decoder_text_input", "STRING", ONE), neutral=("",)),
    Input("image_url_input", "STRING", ANY, "request"),  # data: URLs, in the order of their places in the prompt
    Input("image_bytes_input", "UINT8", (-1, -1, -1, -1), "request"),  # pixels: [images, height, width, 3]
    Input("bad_words", "STRING", ANY, "request"),
    Input("stop_words", "STRING", ANY, "request"),
    Input("end_id", "INT32", ONE, "request"),
    *_PAD_ID,
    *sampling_inputs("ensemble"),
    *_RETURNS,
    Input("embedding_bias_words", "STRING", ANY, "request"),
    Input("embedding_bias_weights", "FP32", ANY, "request"),
    Input("stream", "BOOL", ONE, "request"),
    Input("stop", "BOOL", ONE, "request"),
    *_SESSION,
    *_PROMPT_TUNING,
    *ignored(("prompt_table_extra_id", "UINT64", ONE), why=_EXTRA_IDS),
    *_LORA,
    *_GUIDE,
)

_TEXT_OUTPUTS = (
    Output("text_output", "STRING", ANY, "always"),
    Output("finish_reason", "STRING", ANY, "the last response of a row: stop, length, timeout or cancelled"),
    *_COMMON_OUTPUTS,
)

ENSEMBLE = ModelTensors("ensemble", _TEXT_INPUTS, _TEXT_OUTPUTS)

# The types of v0.5 and v0.6, which langchain still sends.
_ONCE_UINT32 = ("max_tokens", "end_id", "pad_id", "beam_width", "top_k", "min_length", "prompt_vocab_size")
ENSEMBLE_UINT32 = ModelTensors(
    "ensemble_uint32",
    tuple(spec._replace(dtype="UINT32") if spec.name in _ONCE_UINT32 else spec for spec in _TEXT_INPUTS),
    _TEXT_OUTPUTS,
)

BLS = ModelTensors(
    "tensorrt_llm_bls",
    inputs=(
        *_TEXT_INPUTS,
        *refused(
            "pixels of a processor of the client's (image_bytes_input and image_url_input take pictures)",
            ("image_input", "FP16", (-1, 3, -1, -1)),
        ),
        *refused("a video", ("video_bytes_input", "UINT8", (-1, -1, -1, -1))),
        Input("num_draft_tokens", "INT32", ONE, "request"),  # a step, where the engine guesses; 0: as it likes
        *refused("logits of draft tokens", ("use_draft_logits", "BOOL", ONE), neutral=(False,)),
    ),
    outputs=_TEXT_OUTPUTS,
)
