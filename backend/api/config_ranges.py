"""The values that keys of the configuration may have, where these are numbers."""

from __future__ import annotations

import math

MAX_SECONDS = 1e9  # for time spans: finite, so that deadlines in nanoseconds are integers

# key -> (least, greatest) value allowed
RANGES: dict[str, tuple[float, float]] = {
    "model.max_seq_len": (1, math.inf),
    "model.num_threads": (1, 1024),
    "kv_cache.block_size": (1, 1024),
    "kv_cache.max_tokens": (1, math.inf),
    "kv_cache.num_slots": (1, math.inf),
    "kv_cache.free_memory_fraction": (0.001, 1.0),
    "kv_cache.chunk_blocks": (-1, math.inf),
    "kv_cache.max_attention_window": (1, 1 << 40),
    "kv_cache.sink_tokens": (0, 1 << 20),
    "kv_cache.watermark": (0.0, 0.5),
    "scheduler.max_batch_size": (1, 65536),
    "scheduler.max_num_tokens": (1, math.inf),
    "scheduler.tuning_requests": (1, 65536),
    "scheduler.max_beam_width": (1, 65536),
    "scheduler.max_chunk_tokens": (1, math.inf),
    "scheduler.max_context_tokens": (1, math.inf),
    "scheduler.mixed_context_tokens": (1, math.inf),
    "scheduler.max_mixed_context_tokens": (1, math.inf),
    "limits.max_queue_size": (1, math.inf),
    "limits.max_queued_tokens": (1, math.inf),
    "limits.max_words": (0, 65536),
    "limits.max_word_tokens": (1, 65536),
    "limits.max_word_bytes": (1, 1 << 20),
    "limits.max_bias_bytes": (0, 1 << 24),
    "limits.max_logit_bias": (0, 1 << 20),
    "limits.max_top_log_probs": (0, 1000),
    "limits.max_extra_bytes": (0, 1 << 25),
    "limits.max_tensor_bytes": (0, 60 << 20),  # a frame between processes holds 64 MiB
    "limits.max_live_tensor_bytes": (0, math.inf),
    "limits.max_request_batch": (1, 65536),
    "limits.default_timeout_s": (0.001, MAX_SECONDS),
    "limits.max_timeout_s": (0.001, MAX_SECONDS),
    "sessions.max_sessions": (1, math.inf),
    "sessions.max_bytes": (0, math.inf),
    "sessions.idle_ttl_s": (0.001, MAX_SECONDS),
    "records.max_iterations": (0, 1_000_000),
    "records.max_request_iterations": (0, 1_000_000),
    "records.max_kv_events": (0, 10_000_000),
    "records.max_debug_iterations": (0, 1_000_000),
    "guided.max_bytes": (1, 1 << 24),
    "guided.compile_timeout_s": (0.01, 3600.0),
    "guided.max_compiling": (1, 65536),
    "guided.cache_bytes": (0, math.inf),
    "lora.max_rank": (1, 1024),
    "lora.host_bytes": (0, math.inf),
    "lora.device_fraction": (0.0, 1.0),
    "lora.host_module_layers": (0, math.inf),
    "lora.device_module_layers": (0, math.inf),
    "lora.put_workers": (1, 64),
    "speculation.max_draft_tokens": (1, 256),
    "speculation.max_shared_tokens": (0, 1 << 30),
    "triton.sender_threads": (1, 64),
    "triton.cancellation_check_period_ms": (1, 60_000),
    "triton.stats_period_ms": (1, 60_000),
    "triton.text_threads": (1, 64),
    "triton.stream_interval_ms": (0, 10_000),
    "triton.text_timeout_s": (0.01, MAX_SECONDS),
    "triton.watchdog_timeout_s": (1.0, MAX_SECONDS),
    "triton.step_timeout_s": (1.0, MAX_SECONDS),
    "triton.attach_timeout_s": (0.1, MAX_SECONDS),
}


def range_in_words(least: float, greatest: float) -> str:
    return f"{least:.10g} or more" if greatest == math.inf else f"{least:.10g} to {greatest:.10g}"
