"""Rows as a picture: tokens/s at each concurrency, the ratio to the best peer, the share of the roof."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.peers.engines import OURS
from benchmarks.peers.rows import Row

COLOURS = {
    OURS: "#2a7f62",
    "openvino": "#4f6db0",
    "llamacpp": "#c98a2b",
    "ik_llamacpp": "#b0483f",
    "vllm": "#8a5a9e",
    "transformers": "#8c8c8c",
}
_BAR = 0.8  # all bars of a group take this share of its width


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Upper row: an axis for each concurrency, from zero, with the roof. Lower row: ratios and shares, grouped."""
    pyplot = pictures.pyplot()
    measured = [row for row in rows if row["decode_tokens_per_s"] is not None]
    engines = list(dict.fromkeys(row["engine"] for row in measured))
    concurrencies = list(dict.fromkeys(row["concurrency"] for row in rows))
    figure = pyplot.figure(figsize=(max(8.0, 3.2 * len(concurrencies)), 6.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    for axes, concurrency in zip(upper.subplots(1, len(concurrencies), squeeze=False)[0], concurrencies):
        _rates(axes, [row for row in measured if row["concurrency"] == concurrency], concurrency)
    left, right = lower.subplots(1, 2)
    _groups(left, measured, engines, concurrencies, "ratio_to_best_peer", "decode, ratio to the best peer")
    _groups(right, measured, engines, concurrencies, "roof_fraction", "decode, share of the read-bandwidth roof")
    for axes in (left, right):
        axes.axhline(1, color="black", linewidth=0.8)
    if engines:
        lower.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(engines), fontsize=8)
    figure.suptitle(
        f"{title}\nbars: best of the repeats; dash: median; dashed line and shares of the roof: medians", fontsize=9
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _rates(axes: Any, rows: Sequence[Row], concurrency: int) -> None:
    """Bars of the best of the repeats, with a mark at the median, and the roof."""
    names = [row["engine"] for row in rows]
    best = [row["decode_tokens_per_s"] for row in rows]
    bars = axes.bar(range(len(rows)), best, color=[COLOURS[name] for name in names])
    axes.bar_label(bars, [f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" for rate in best], fontsize=7)
    axes.scatter(
        range(len(rows)), [row["median_decode_tokens_per_s"] for row in rows], color="black", marker="_", s=120
    )
    if rows:
        roof = statistics.median(row["roof_tokens_per_s"] for row in rows)
        axes.axhline(roof, color="black", linestyle="--", linewidth=0.8)
    axes.set_xticks(range(len(rows)), names, rotation=35, ha="right", fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title(f"decode tokens/s, {concurrency} at once", fontsize=9)
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)


def _groups(
    axes: Any, rows: Sequence[Row], engines: Sequence[str], concurrencies: Sequence[int], key: str, title: str
) -> None:
    """A group of bars for each concurrency, a bar for each engine."""
    values = {(row["engine"], row["concurrency"]): row[key] for row in rows}
    width = _BAR / max(1, len(engines))
    for place, engine in enumerate(engines):
        left = [group - _BAR / 2 + (place + 0.5) * width for group in range(len(concurrencies))]
        heights = [values.get((engine, concurrency)) or 0.0 for concurrency in concurrencies]
        bars = axes.bar(left, heights, width, color=COLOURS[engine], label=engine)
        axes.bar_label(bars, [f"{height:.2f}" if height else "" for height in heights], fontsize=6)
    axes.set_xticks(range(len(concurrencies)), [f"{concurrency} at once" for concurrency in concurrencies], fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title(title, fontsize=9)
    axes.margins(y=0.1)
    axes.grid(axis="y", alpha=0.3)
