"""PromQL as it stands in what people run around a vLLM server, for tests: Grafana's variables are in it as they are there.

Sources, as their authors publish them: vLLM's examples (the dashboard of its example for Prometheus and Grafana; the dashboards
"performance statistics" and "query statistics"), production-stack's dashboard and autoscaling example, KEDA's and KServe's
examples, the metrics that the Gateway API inference extension's endpoint picker reads from a vLLM server.
"""

from __future__ import annotations

_OF_MODEL = 'model_name="$model_name"'
_OF_ALL = 'job=~"$job",model_name=~"$model_name",instance=~"$instance",engine=~"$engine"'
_TIMES = ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds")
_PHASES = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")

VLLM_EXAMPLE = [
    *(
        f"histogram_quantile({q}, sum by(le) (rate(vllm:{name}_bucket{{{_OF_MODEL}}}[$__rate_interval])))"
        for name in (*_TIMES, "time_per_output_token_seconds")
        for q in (0.99, 0.95, 0.9, 0.5)
    ),
    *(
        f"rate(vllm:{name}_sum{{{_OF_MODEL}}}[$__rate_interval]) / rate(vllm:{name}_count{{{_OF_MODEL}}}[$__rate_interval])"
        for name in (*_TIMES, "time_per_output_token_seconds")
    ),
    *(f"rate(vllm:{name}_sum{{{_OF_MODEL}}}[$__rate_interval])" for name in _PHASES),
    f"rate(vllm:prompt_tokens_total{{{_OF_MODEL}}}[$__rate_interval])",
    f"rate(vllm:generation_tokens_total{{{_OF_MODEL}}}[$__rate_interval])",
    f"vllm:num_requests_running{{{_OF_MODEL}}}",
    f"vllm:num_requests_waiting{{{_OF_MODEL}}}",
    f"vllm:num_requests_swapped{{{_OF_MODEL}}}",
    f"vllm:kv_cache_usage_perc{{{_OF_MODEL}}}",
    f"vllm:gpu_cache_usage_perc{{{_OF_MODEL}}}",
    f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{{{_OF_MODEL}}}[$__rate_interval]))",
    f"sum by(le) (increase(vllm:request_generation_tokens_bucket{{{_OF_MODEL}}}[$__rate_interval]))",
    f"sum by(le) (increase(vllm:request_max_num_generation_tokens_bucket{{{_OF_MODEL}}}[$__rate_interval]))",
    f"sum by(finished_reason) (increase(vllm:request_success_total{{{_OF_MODEL}}}[$__rate_interval]))",
]
VLLM_STATISTICS = [
    *(
        f"histogram_quantile({q}, sum by (le) (rate(vllm:{name}_bucket{{{_OF_ALL}}}[$__rate_interval])))"
        for name in (*_TIMES, *_PHASES, "request_inference_time_seconds", "request_time_per_output_token_seconds")
        for q in (0.5, 0.9, 0.99)
    ),
    *(
        f"histogram_quantile({q}, sum by (le) (rate(vllm:{name}_bucket{{{_OF_ALL}}}[$__rate_interval])))"
        for name in (
            *("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens", "request_params_n"),
            *("request_prefill_kv_computed_tokens", "iteration_tokens_total"),
        )
        for q in (0.5, 0.99)
    ),
    f"max(vllm:num_requests_running{{{_OF_ALL}}})",
    f"max(vllm:num_requests_waiting{{{_OF_ALL}}})",
    f'max(vllm:num_requests_waiting_by_reason{{{_OF_ALL},reason="capacity"}})',
    f'max(vllm:num_requests_waiting_by_reason{{{_OF_ALL},reason="deferred"}})',
    f"max(vllm:kv_cache_usage_perc{{{_OF_ALL}}})",
    f"sum(rate(vllm:prompt_tokens_total{{{_OF_ALL}}}[$__rate_interval]))",
    f"sum(rate(vllm:prompt_tokens_cached_total{{{_OF_ALL}}}[$__rate_interval]))",
    f"sum(rate(vllm:generation_tokens_total{{{_OF_ALL}}}[$__rate_interval]))",
    f"sum(increase(vllm:request_success_total{{{_OF_ALL}}}[$__rate_interval]))",
    f"sum(rate(vllm:num_preemptions_total{{{_OF_ALL}}}[$__rate_interval]))",
    f"sum(rate(vllm:prefix_cache_hits_total{{{_OF_ALL}}}[$__rate_interval]))"
    f" / sum(rate(vllm:prefix_cache_queries_total{{{_OF_ALL}}}[$__rate_interval]))",
    f"sum(rate(vllm:spec_decode_num_accepted_tokens_total{{{_OF_ALL}}}[$__rate_interval]))"
    f" / sum(rate(vllm:spec_decode_num_draft_tokens_total{{{_OF_ALL}}}[$__rate_interval]))",
    f"vllm:cache_config_info{{{_OF_ALL}}}",
]
PRODUCTION_STACK = [
    "histogram_quantile(0.95, sum(rate(vllm:time_to_first_token_seconds_bucket[5m])) by (le))",
    "sum by(le) (vllm:e2e_request_latency_seconds_bucket)",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:gpu_cache_usage_perc",
    "rate(vllm:gpu_prefix_cache_hits_total[5m]) / rate(vllm:gpu_prefix_cache_queries_total[5m])",
]
AUTOSCALING = [
    "sum(vllm:num_requests_waiting)",
    'sum(vllm:num_requests_waiting{model_name="$model_name"})',
    "avg(vllm:num_requests_running)",
    "sum(rate(vllm:generation_tokens_total[1m]))",
    "avg(vllm:kv_cache_usage_perc) * 100",
    "sum(increase(vllm:request_success_total[1m]))",
]
ENDPOINT_PICKER = [
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "max by (max_lora, running_lora_adapters, waiting_lora_adapters) (vllm:lora_requests_info)",
    "max by (block_size, num_gpu_blocks) (vllm:cache_config_info)",
]
ALL = [*VLLM_EXAMPLE, *VLLM_STATISTICS, *PRODUCTION_STACK, *AUTOSCALING, *ENDPOINT_PICKER]
