"""Statistics of the engine as a page of metrics with vLLM's names, types, labels and buckets (vllm/v1/metrics/loggers.py).

What reads it: vLLM's Grafana dashboards, KEDA's and production-stack's examples, routers of the Gateway API inference extension.
The format is Prometheus' text format 0.0.4.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from backend.api import EngineStats
from backend.api.config.schema import EngineConfig
from backend.api.distributions import BOUNDS, Histogram
from backend.api.stats import EngineCounters

Labels = dict[str, str]
Sample = tuple[Labels, float]
ENGINE = "0"  # vLLM's number of a data-parallel rank; replicas here are added up

# vLLM's histogram -> the distribution that it shows, its meaning. The second names of one are those of vLLM's earlier releases.
HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token_s", "Histogram of time to first token in seconds."),
    "inter_token_latency_seconds": ("between_tokens_s", "Histogram of inter-token latency in seconds."),
    "time_per_output_token_seconds": ("between_tokens_s", "Earlier name of vllm:inter_token_latency_seconds."),
    "request_time_per_output_token_seconds": ("per_token_s", "Histogram of time_per_output_token_seconds per request."),
    "e2e_request_latency_seconds": ("total_s", "Histogram of e2e request latency in seconds."),
    "request_queue_time_seconds": ("queue_s", "Histogram of time spent in WAITING phase for request."),
    "request_inference_time_seconds": ("run_s", "Histogram of time spent in RUNNING phase for request."),
    "request_prefill_time_seconds": ("context_s", "Histogram of time spent in PREFILL phase for request."),
    "request_decode_time_seconds": ("generation_s", "Histogram of time spent in DECODE phase for request."),
    "request_prompt_tokens": ("prompt_tokens", "Number of prefill tokens processed."),
    "request_prefill_kv_computed_tokens": (
        "computed_prompt_tokens",
        "New KV tokens computed during prefill, excluding cached tokens.",
    ),
    "request_generation_tokens": ("output_tokens", "Number of generation tokens processed."),
    "request_max_num_generation_tokens": (
        "longest_output_tokens",
        "Histogram of maximum number of requested generation tokens.",
    ),
    "request_params_max_tokens": ("max_tokens", "Histogram of the max_tokens request parameter."),
    "request_params_n": ("num_sequences", "Histogram of the n request parameter."),
    "iteration_tokens_total": ("step_tokens", "Histogram of number of tokens per engine_step."),
}
_LENGTHS = {"prompt_tokens", "computed_prompt_tokens", "output_tokens", "longest_output_tokens", "max_tokens"}
FINISHED = {  # vLLM's reason -> those of this engine
    "stop": ("END_ID", "STOP_WORDS"),
    "length": ("LENGTH",),
    "abort": ("CANCELLED", "TIMED_OUT"),
    "error": ("ERROR",),
}


class PageFamily(NamedTuple):
    """`name` without the prefix `vllm:`; each sample has the labels that tell it from the others."""

    name: str
    kind: str  # gauge or counter
    meaning: str
    samples: list[Sample]


def vllm_page(stats: EngineStats, config: EngineConfig, max_seq_len: int, model_name: str) -> str:
    """The page. `model_name`: value of that label, any text; `max_seq_len`, in tokens, bounds the buckets of lengths."""
    common = {"model_name": model_name, "engine": ENGINE}
    lines: list[str] = []
    for family in _families(stats, config):
        lines += _head(family.name, family.kind, family.meaning)
        lines += (f"vllm:{family.name}{_labels(common | own)} {value!r}" for own, value in family.samples)
    for name, (key, meaning) in HISTOGRAMS.items():
        most = max_seq_len if key in _LENGTHS else math.inf
        lines += _head(name, "histogram", meaning)
        lines += _histogram(f"vllm:{name}", common, stats.distributions.histograms[key], BOUNDS[key], most)
    return "\n".join(lines) + "\n"


def _families(stats: EngineStats, config: EngineConfig) -> Iterator[PageFamily]:
    yield from _gauges(stats, config)
    yield from _counters(stats.counters)
    images = stats.latest.images
    queried = images.images_encoded_total + images.images_failed_total + images.images_reused_total
    yield _counter("mm_cache_queries_total", "Multi-modal cache queries, in terms of number of queried items.", queried)
    hits = images.images_reused_total
    yield _counter("mm_cache_hits_total", "Multi-modal cache hits, in terms of number of cached items.", hits)
    kv, cache = stats.latest.kv_cache, config.kv_cache
    about = {
        "block_size": str(kv.tokens_per_block),
        "num_gpu_blocks": str(kv.max_num_blocks),
        "num_cpu_blocks": "0" if config.scheduler.preemption != "swap" else "None",
        "cache_dtype": str(cache.dtype),
        "enable_prefix_caching": str(cache.enable_block_reuse and cache.sharing != "none"),
        "gpu_memory_utilization": str(cache.free_memory_fraction),
        "sliding_window": str(cache.max_attention_window),
        "swap_space_bytes": str(cache.swap_bytes),
    }
    yield PageFamily("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", [(about, 1)])
    if config.lora.enabled:
        names = {
            "max_lora": str(config.scheduler.max_batch_size),  # each sequence of a batch may have another one
            "running_lora_adapters": ",".join(sorted(stats.running_adapters)),
            "waiting_lora_adapters": ",".join(sorted(stats.waiting_adapters)),
        }
        yield PageFamily("lora_requests_info", "gauge", "Running stats on lora requests.", [(names, time.time())])


def _gauges(stats: EngineStats, config: EngineConfig) -> Iterator[PageFamily]:
    latest = stats.latest
    swapped = latest.num_paused_requests if config.scheduler.preemption == "swap" else 0
    capacity = latest.num_queued_requests + latest.num_paused_requests - swapped
    deferred = latest.num_preparing_requests
    usage = latest.kv_cache.used_num_blocks / max(1, latest.kv_cache.max_num_blocks)
    yield _gauge("num_requests_running", "Number of requests in model execution batches.", latest.num_running_sequences)
    yield _gauge("num_requests_waiting", "Number of requests waiting to be processed.", capacity + deferred)
    yield PageFamily(
        "num_requests_waiting_by_reason",
        "gauge",
        "Waiting requests: for room in the batch (capacity), or for their guide, images or adapter (deferred).",
        [({"reason": "capacity"}, capacity), ({"reason": "deferred"}, deferred)],
    )
    yield _gauge("num_requests_swapped", "Paused requests whose KV is kept in host memory.", swapped)
    yield _gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage)
    yield _gauge("gpu_cache_usage_perc", "Earlier name of vllm:kv_cache_usage_perc.", usage)


def _counters(counters: EngineCounters) -> Iterator[PageFamily]:
    prompt, cached = counters.answered_prompt_tokens_total, counters.answered_cached_tokens_total
    queries, hits = counters.queried_tokens_total, counters.cached_tokens_total
    finished = counters.requests_finished_total
    for name, meaning, value in (
        ("prompt_tokens_total", "Number of prefill tokens processed.", prompt),
        ("prompt_tokens_cached_total", "Prompt tokens of them whose KV was in the cache.", cached),
        ("generation_tokens_total", "Number of generation tokens processed.", counters.generated_tokens_total),
        ("prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", queries),
        ("prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", hits),
        ("gpu_prefix_cache_queries_total", "Earlier name of vllm:prefix_cache_queries_total.", queries),
        ("gpu_prefix_cache_hits_total", "Earlier name of vllm:prefix_cache_hits_total.", hits),
        ("num_preemptions_total", "Cumulative number of preemption from the engine.", counters.pauses_total),
        ("spec_decode_num_draft_tokens_total", "Number of draft tokens.", counters.draft_tokens_total),
        ("spec_decode_num_accepted_tokens_total", "Accepted draft tokens.", counters.accepted_draft_tokens_total),
    ):
        yield _counter(name, meaning, value)
    reasons: list[Sample] = [
        ({"finished_reason": told}, sum(finished.get(reason, 0) for reason in ours)) for told, ours in FINISHED.items()
    ]
    yield PageFamily("request_success_total", "counter", "Count of successfully processed requests.", reasons)


def _gauge(name: str, meaning: str, value: float) -> PageFamily:
    return PageFamily(name, "gauge", meaning, [({}, value)])


def _counter(name: str, meaning: str, value: float) -> PageFamily:
    return PageFamily(name, "counter", meaning, [({}, value)])


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP vllm:{name} {meaning}", f"# TYPE vllm:{name} {kind}"]


def _histogram(name: str, labels: Labels, histogram: Histogram, bounds: Iterable[float], most: float) -> Iterator[str]:
    """The samples of a histogram, with those bounds that are at most `most`."""
    count = 0
    for bound, in_bucket in zip(bounds, histogram.counts):
        count += in_bucket
        if bound <= most:
            yield f"{name}_bucket{_labels({**labels, 'le': str(bound)})} {count}"
    count += histogram.counts[-1]
    yield f"{name}_bucket{_labels({**labels, 'le': '+Inf'})} {count}"
    yield f"{name}_count{_labels(labels)} {count}"
    yield f"{name}_sum{_labels(labels)} {histogram.total!r}"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
