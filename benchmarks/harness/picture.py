"""The results as one PNG: a row for each figure that is shown, a column for each kind of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.harness.metrics import BY_KEY, SHOWN

COLOURS = ("#1d7a5a", "#4f6db0", "#c1802a", "#8a5a9e", "#2f98a8", "#6fae7d", "#8c8c8c")


def draw(document: dict[str, Any], path: Path) -> Path:
    """Write the picture."""
    pyplot = pictures.pyplot()
    kinds = list(dict.fromkeys(_kind(row) for row in document["rows"]))
    lanes = list(dict.fromkeys(row["lane"] for row in document["rows"]))
    keys = SHOWN[:4]
    size = (max(4.0, 2.7 * len(kinds)), 2.1 * len(keys) + 0.9)
    figure, grid = pyplot.subplots(len(keys), len(kinds), figsize=size, squeeze=False, layout="constrained")
    for across, kind in enumerate(kinds):
        for down, key in enumerate(keys):
            axes = grid[down][across]
            for lane, colour in zip(lanes, COLOURS * len(lanes)):
                rows = [row for row in document["rows"] if (_kind(row), row["lane"]) == (kind, lane)]
                _line(axes, [row for row in rows if key in row["median"]], key, lane, colour)
            axes.set_ylim(bottom=0)
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.3)
            if down == 0:
                axes.set_title(kind, fontsize=8)
            if across == 0:
                axes.set_ylabel(f"{BY_KEY[key].title}\n{BY_KEY[key].unit}", fontsize=7)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(4, len(lanes))), fontsize=8)
    figure.suptitle(f"{document['model']['name']}, against the number of users; bars span the repeats", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _kind(row: dict[str, Any]) -> str:
    name = f"{row['prompt']}:{row['new']}"
    return f"{row['conversations']} conversations\nof {row['turns']} turns, {name}" if row["conversations"] else name


def _line(axes: Any, rows: list[dict[str, Any]], key: str, lane: str, colour: str) -> None:
    """Medians as a line over equal steps of users, with bars from the least repeat to the greatest."""
    rows = sorted(rows, key=lambda row: row["users"])
    places = [str(row["users"]) for row in rows]
    medians = [row["median"][key] for row in rows]
    values = [[figures[key] for figures in row["repeats"] if key in figures] for row in rows]
    below = [median - min(several) for median, several in zip(medians, values)]
    above = [max(several) - median for median, several in zip(medians, values)]
    axes.errorbar(
        places, medians, yerr=[below, above], color=colour, label=lane, marker="o", markersize=3, linewidth=1.4
    )
