"""Writes deploy/monitoring/grafana/dashboards/*.json from the tables below.

.venv/bin/python -m tools.write_dashboards          rewrite them
.venv/bin/python -m tools.write_dashboards --check  fail when they are not up to date

Two dashboards: `everbatch` reads this project's own families, `vllm` only vLLM's, so that it also fits a vLLM server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

DIRECTORY = Path(__file__).resolve().parent.parent / "deploy" / "monitoring" / "grafana" / "dashboards"
RANGE = "$__rate_interval"
OURS = 'instance=~"$instance"'
VLLM = 'model_name=~"$model_name",instance=~"$instance"'
WIDTH, HEIGHT = 8, 8  # the size of a panel in Grafana's grid of 24 columns


class Panel(NamedTuple):
    """`targets`: (expression, legend); `unit`: one of Grafana's names of units."""

    title: str
    unit: str
    targets: list[tuple[str, str]]
    kind: str = "timeseries"


class Dashboard(NamedTuple):
    uid: str
    title: str
    variables: list[tuple[str, str]]  # (name, query of its values)
    rows: list[tuple[str, list[Panel]]]


def each_second(name: str, labels: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{labels}}}[{RANGE}]))"


def quantiles(title: str, name: str, labels: str) -> Panel:
    """The 50th, 95th and 99th percentile of a histogram in seconds, and its mean."""
    targets = [
        (f"histogram_quantile({q}, sum by (le) (rate({name}_bucket{{{labels}}}[{RANGE}])))", f"p{q * 100:g}")
        for q in (0.5, 0.95, 0.99)
    ]
    mean = f"{each_second(f'{name}_sum', labels)} / {each_second(f'{name}_count', labels)}"
    return Panel(title, "s", [*targets, (mean, "mean")])


def heat(title: str, name: str, labels: str) -> Panel:
    return Panel(title, "short", [(f"sum by (le) (increase({name}_bucket{{{labels}}}[{RANGE}]))", "{{le}}")], "heatmap")


def of(name: str, labels: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({name}{{{labels}}})"


def with_label(name: str, value: str) -> str:
    return f'{OURS},{name}="{value}"'


EVERBATCH = Dashboard(
    "everbatch",
    "Everbatch",
    [("instance", "label_values(everbatch_engine_ready, instance)")],
    [
        (
            "Requests",
            [
                Panel(
                    "Engine ready", "short", [(f"min by (instance) (everbatch_engine_ready{{{OURS}}})", "{{instance}}")]
                ),
                Panel("Requests by state", "short", [(of("everbatch_requests", OURS, "state"), "{{state}}")]),
                Panel(
                    "Ended, by reason",
                    "reqps",
                    [(each_second("everbatch_requests_finished_total", OURS, "reason"), "{{reason}}")],
                ),
                quantiles("Time to first token", "everbatch_time_to_first_token_seconds", OURS),
                quantiles("Between two tokens", "everbatch_inter_token_latency_seconds", OURS),
                quantiles("Whole request", "everbatch_request_seconds", OURS),
                quantiles("Waiting in the queue", "everbatch_queue_seconds", OURS),
                Panel(
                    "Refused by the engine",
                    "reqps",
                    [(each_second("everbatch_requests_rejected_total", OURS), "refused")],
                ),
                Panel(
                    "HTTP requests by status",
                    "reqps",
                    [(each_second("everbatch_gateway_requests_total", OURS, "status"), "{{status}}")],
                ),
            ],
        ),
        (
            "Tokens",
            [
                Panel("Tokens by kind", "short", [(each_second("everbatch_tokens_total", OURS, "kind"), "{{kind}}")]),
                Panel(
                    "Part of prompts that was found in the cache",
                    "percentunit",
                    [
                        (
                            each_second("everbatch_tokens_total", with_label("kind", "cached"))
                            + f" / ({each_second('everbatch_tokens_total', with_label('kind', 'cached'))}"
                            + f" + {each_second('everbatch_tokens_total', with_label('kind', 'context'))})",
                            "cached",
                        )
                    ],
                ),
                Panel(
                    "Part of prompt work that is done again after an eviction",
                    "percentunit",
                    [
                        (
                            each_second("everbatch_tokens_total", with_label("kind", "recomputed"))
                            + f" / {each_second('everbatch_tokens_total', with_label('kind', 'context'))}",
                            "recomputed",
                        )
                    ],
                ),
                Panel("Steps", "ops", [(each_second("everbatch_steps_total", OURS), "steps")]),
                Panel(
                    "Guesses at tokens",
                    "short",
                    [(each_second("everbatch_draft_tokens_total", OURS, "outcome"), "{{outcome}}")],
                ),
                Panel(
                    "Tokens of clients",
                    "short",
                    [(each_second("everbatch_client_tokens_total", OURS, "kind"), "{{kind}}")],
                ),
            ],
        ),
        (
            "KV cache",
            [
                Panel(
                    "Blocks by state",
                    "short",
                    [(of("everbatch_kv_blocks", f'{OURS},state=~"free|cached|used"', "state"), "{{state}}")],
                ),
                Panel(
                    "Blocks by event", "short", [(each_second("everbatch_kv_blocks_total", OURS, "event"), "{{event}}")]
                ),
                Panel(
                    "Pauses and evictions",
                    "ops",
                    [
                        (each_second("everbatch_pauses_total", OURS), "pauses"),
                        (each_second("everbatch_evictions_total", OURS), "evictions"),
                    ],
                ),
                Panel(
                    "Second level, blocks by event",
                    "short",
                    [(each_second("everbatch_second_level_blocks_total", OURS, "event"), "{{event}}")],
                ),
                Panel("Sessions", "short", [(of("everbatch_sessions", OURS), "sessions")]),
                Panel(
                    "Images",
                    "short",
                    [(each_second("everbatch_images_total", OURS, "event"), "{{event}}")],
                ),
                Panel(
                    "Seconds of a second in which images are encoded",
                    "percentunit",
                    [(each_second("everbatch_image_encoding_seconds_total", OURS), "encoder")],
                ),
                Panel(
                    "Room for features of images",
                    "bytes",
                    [(of("everbatch_image_bytes", OURS, "state"), "{{state}}")],
                ),
                Panel(
                    "Memory",
                    "bytes",
                    [(of("nv_trt_llm_runtime_memory_metrics", OURS, "memory_type"), "{{memory_type}}")],
                ),
            ],
        ),
        (
            "Life of the engine",
            [
                Panel(
                    "Engine restarts that requests waited for",
                    "short",
                    [
                        (
                            f"sum by (instance) (increase(everbatch_engine_pauses_total{{{OURS}}}[{RANGE}]))",
                            "{{instance}}",
                        )
                    ],
                ),
                Panel(
                    "Requests that went on with another engine",
                    "short",
                    [
                        (
                            f"sum by (instance) (increase(everbatch_resumed_requests_total{{{OURS}}}[{RANGE}]))",
                            "{{instance}}",
                        )
                    ],
                ),
                Panel("Spans", "ops", [(each_second("everbatch_spans_total", OURS, "outcome"), "{{outcome}}")]),
            ],
        ),
    ],
)

VLLM_NAMES = Dashboard(
    "everbatch-vllm-names",
    "vLLM's names",
    [
        ("model_name", "label_values(vllm:num_requests_running, model_name)"),
        ("instance", "label_values(vllm:num_requests_running, instance)"),
    ],
    [
        (
            "Performance",
            [
                quantiles("E2E request latency", "vllm:e2e_request_latency_seconds", VLLM),
                quantiles("Time to first token", "vllm:time_to_first_token_seconds", VLLM),
                quantiles("Inter-token latency", "vllm:inter_token_latency_seconds", VLLM),
                Panel(
                    "Token throughput",
                    "short",
                    [
                        (each_second("vllm:prompt_tokens_total", VLLM), "prompt"),
                        (each_second("vllm:generation_tokens_total", VLLM), "generation"),
                    ],
                ),
                Panel(
                    "Scheduler state",
                    "short",
                    [
                        (of("vllm:num_requests_running", VLLM), "running"),
                        (of("vllm:num_requests_waiting", VLLM), "waiting"),
                        (of("vllm:num_requests_swapped", VLLM), "swapped"),
                    ],
                ),
                Panel(
                    "KV cache usage",
                    "percentunit",
                    [(f"max by (instance) (vllm:kv_cache_usage_perc{{{VLLM}}})", "{{instance}}")],
                ),
                quantiles("Queue time", "vllm:request_queue_time_seconds", VLLM),
                quantiles("Prefill time", "vllm:request_prefill_time_seconds", VLLM),
                quantiles("Decode time", "vllm:request_decode_time_seconds", VLLM),
            ],
        ),
        (
            "Queries",
            [
                heat("Prompt length", "vllm:request_prompt_tokens", VLLM),
                heat("Generation length", "vllm:request_generation_tokens", VLLM),
                heat("max_tokens", "vllm:request_params_max_tokens", VLLM),
                Panel(
                    "Finish reason",
                    "reqps",
                    [(each_second("vllm:request_success_total", VLLM, "finished_reason"), "{{finished_reason}}")],
                ),
                Panel(
                    "Prefix cache hit rate",
                    "percentunit",
                    [
                        (
                            f"{each_second('vllm:prefix_cache_hits_total', VLLM)}"
                            f" / {each_second('vllm:prefix_cache_queries_total', VLLM)}",
                            "hits",
                        )
                    ],
                ),
                Panel("Preemptions", "ops", [(each_second("vllm:num_preemptions_total", VLLM), "preemptions")]),
                heat("Tokens of a step", "vllm:iteration_tokens_total", VLLM),
                Panel(
                    "Waiting, by reason",
                    "short",
                    [(of("vllm:num_requests_waiting_by_reason", VLLM, "reason"), "{{reason}}")],
                ),
                quantiles("Time per output token of a request", "vllm:request_time_per_output_token_seconds", VLLM),
            ],
        ),
    ],
)
DASHBOARDS = {"everbatch.json": EVERBATCH, "vllm.json": VLLM_NAMES}


def document(board: Dashboard) -> dict[str, Any]:
    """The dashboard in Grafana's JSON (schema version 39: Grafana 10.4 and later)."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in board.rows:
        panels.append({"type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        y += 1
        for index, panel in enumerate(members):
            place = {"x": index % 3 * WIDTH, "y": y + index // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel) | {"gridPos": place})
        y += -(-len(members) // 3) * HEIGHT
    return {
        "uid": board.uid,
        "title": board.title,
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["everbatch"],
        "templating": {"list": [_variable(name, query) for name, query in board.variables]},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, start=1)],
    }


def _panel(panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    shape = "heatmap" if panel.kind == "heatmap" else "time_series"
    targets = [
        {"refId": chr(ord("A") + number), "datasource": source, "expr": expr, "legendFormat": legend, "format": shape}
        for number, (expr, legend) in enumerate(panel.targets)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {},
        "targets": targets,
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def texts() -> dict[str, str]:
    """The content of each file, by its name."""
    return {name: json.dumps(document(board), indent=1) + "\n" for name, board in DASHBOARDS.items()}


def main(arguments: list[str]) -> int:
    """Returns 0, or with --check 1 when a file is stale."""
    stale = [name for name, text in texts().items() if _stored(name) != text]
    if "--check" not in arguments:
        for name in stale:
            (DIRECTORY / name).write_text(texts()[name])
    print(f"{len(stale)} of {len(DASHBOARDS)} dashboards were stale")
    return 1 if stale and "--check" in arguments else 0


def _stored(name: str) -> str:
    path = DIRECTORY / name
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
