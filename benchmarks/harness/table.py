"""The results on a terminal: a table for each cell's figures, the best of each in bold."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from benchmarks.harness.metrics import BY_KEY, METRICS, Metric, written

RATIOS = ("output_tokens_per_s", "first_token_ms_p50", "inter_token_ms_p99", "returning_first_token_ms_p50")
_COLUMNS = {
    "output_tokens_per_s": "tokens/s",
    "goodput_per_s": "goodput /s",
    "first_token_ms_p50": "first token ms",
    "first_token_ms_p99": "p99",
    "inter_token_ms_p50": "inter-token ms",
    "inter_token_ms_p99": "p99",
    "gap_ms_p99": "gap p99",
    "returning_first_token_ms_p50": "returning ms",
    "recomputed_per_turn": "recomputed",
    "speed_up": "speed-up",
}


def table_of(document: dict[str, Any]) -> Table:
    """A section for each cell."""
    title = f"{document['model']['name']}: medians of {document['options']['repeats']}, the best in bold"
    table = Table(title=title)
    for name in ("cell", "server"):
        table.add_column(name)
    used = [metric for metric in METRICS if any(metric.key in row["median"] for row in document["rows"])]
    for metric in used:
        table.add_column(_COLUMNS[metric.key], justify="right")
    for cell, rows in by_cell(document).items():
        for place, row in enumerate(rows):
            values = [_value(row, metric, rows) for metric in used]
            table.add_row(cell if place == 0 else "", row["lane"], *values, end_section=place == len(rows) - 1)
    return table


def ratios(document: dict[str, Any], ours: str) -> list[str]:
    """How many times better `ours` is than the best lane of another server: a sentence a figure, over cells with both."""
    sentences = []
    for key in RATIOS:
        found = []
        for rows in by_cell(document).values():
            mine = next((row["median"].get(key) for row in rows if row["lane"] == ours), None)
            theirs = best([row for row in rows if not row["lane"].startswith(ours)], key)
            if mine and theirs:
                found.append(mine / theirs if BY_KEY[key].more_is_better else theirs / mine)
        if found:
            span = f"{min(found):.2f} to {max(found):.2f} in {len(found)} cell{'s' if len(found) > 1 else ''}"
            sentences.append(
                f"{BY_KEY[key].title}: {statistics.geometric_mean(found):.2f} times the best peer ({span})"
            )
    return sentences


def by_cell(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows by the name of their cell, in the order of the document."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        cells.setdefault(row["cell"], []).append(row)
    return cells


def best(rows: list[dict[str, Any]], key: str) -> float | None:
    """The best median of a figure over all servers; None where no server has one."""
    values = [row["median"][key] for row in rows if key in row["median"]]
    if not values:
        return None
    return float(max(values) if BY_KEY[key].more_is_better else min(values))


def _value(row: dict[str, Any], metric: Metric, rows: list[dict[str, Any]]) -> str:
    value = row["median"].get(metric.key)
    if value is None:
        return "-"
    return f"[bold]{written(value)}[/bold]" if value == best(rows, metric.key) else written(value)
