"""The results as a page of HTML that needs nothing else, and as a picture."""

from __future__ import annotations

import statistics
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.harness.metrics import BY_KEY, METRICS, SHOWN, Metric, written
from benchmarks.harness.picture import draw
from benchmarks.harness.table import best, by_cell
from benchmarks.served.charts import Line, Point, chart
from benchmarks.served.options import OURS

STYLE = Path(__file__).with_name("report.css")
MOST_COLOURS = 7  # of report.css
FIRST = "first_token_ms_p50"
RETURNING = "returning_first_token_ms_p50"


def write(document: dict[str, Any], directory: Path) -> list[Path]:
    """served.html and served.png in the directory."""
    page = directory / "served.html"
    page.write_text(html_of(document))
    return [page, draw(document, directory / "served.png")]


def html_of(document: dict[str, Any]) -> str:
    """The page. Every text of the results is escaped."""
    model, machine = document["model"], document["machine"]
    about = (
        f"{model['name']}: {model['shape']}, {model['weights']} · {machine['cpu']}, {machine['cores']} cores · "
        f"{document['date']} · {document['options']['repeats']} measurements of each server in each cell, medians"
    )
    lanes = lanes_of(document)
    body = [
        "<h1>Everbatch beside other servers</h1>",
        f'<p class="about">{escape(about)}</p>',
        "<p>How many times better Everbatch is than the best of its peers, on average over the cells; below 1 it is worse.</p>",
        f'<div class="tiles">{"".join(tiles(document))}</div>',
        legend(lanes),
        *sections(document, lanes),
        f'<h2>All figures</h2><div class="wide">{table_of(document)}</div>',
        *notes(document),
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(model['name'])}: Everbatch beside other servers</title><style>{STYLE.read_text()}</style></head>"
    )
    return f"{head}<body>{''.join(body)}</body></html>\n"


def lanes_of(document: dict[str, Any]) -> dict[str, str]:
    """The colour of each lane, as a CSS variable: this server first."""
    names = list(dict.fromkeys(row["lane"] for row in document["rows"]))
    names.sort(key=lambda name: (name != OURS, name.startswith(f"{OURS}-")))
    return {name: f"--lane-{min(place, MOST_COLOURS - 1)}" for place, name in enumerate(names)}


def tiles(document: dict[str, Any]) -> list[str]:
    """Ratios to the best peer: what a person looks for first."""
    found = []
    for key, words in (
        ("output_tokens_per_s", "output tokens/s"),
        (FIRST, "median time to the first token"),
        ("inter_token_ms_p99", "p99 of inter-token latency"),
        (RETURNING, "first token of a returning conversation"),
    ):
        ratios = ratios_to_best_peer(document, key)
        if ratios:
            span = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} cell{'s' if len(ratios) > 1 else ''}"
            mean = statistics.geometric_mean(ratios)
            colour = "good" if mean >= 1 else "bad"
            found.append(f'<div class="tile"><b class="{colour}">{mean:.2f} ×</b>{words}<span>{span}</span></div>')
    if not found:
        return ['<div class="tile"><b>no peer</b><span>took part, so there is nothing to compare with</span></div>']
    return found


def ratios_to_best_peer(document: dict[str, Any], key: str) -> list[float]:
    """Of this server by OpenAI's wire, a cell each; above 1 this server is better."""
    ratios = []
    for rows in by_cell(document).values():
        mine = next((row["median"].get(key) for row in rows if row["lane"] == OURS), None)
        theirs = best([row for row in rows if not row["lane"].startswith(OURS)], key)
        if mine and theirs:
            ratios.append(mine / theirs if BY_KEY[key].more_is_better else theirs / mine)
    return ratios


def legend(lanes: dict[str, str]) -> str:
    """Which colour is whose."""
    items = (f'<span><i style="background:var({colour})"></i>{escape(name)}</span>' for name, colour in lanes.items())
    return f'<div class="legend">{"".join(items)}<span class="note">across: the number of users</span></div>'


def sections(document: dict[str, Any], lanes: dict[str, str]) -> list[str]:
    """For each kind of requests the charts of the figures that are shown."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        kinds.setdefault(kind_of(row), []).append(row)
    parts = []
    for kind, rows in kinds.items():
        keys = [RETURNING if key == FIRST else key for key in SHOWN] if rows[0]["conversations"] else SHOWN
        charts = [one_chart(BY_KEY[key], rows, lanes) for key in keys if any(key in row["median"] for row in rows)]
        parts.append(f'<h2>{escape(kind)}</h2><div class="charts">{"".join(charts)}</div>')
    return parts


def kind_of(row: dict[str, Any]) -> str:
    """A cell without its number of users, in words."""
    tokens = f"{row['prompt']:,} tokens of prompt, {row['new']:,} of answer"
    if not row["conversations"]:
        return tokens
    return f"{row['conversations']} conversations of {row['turns']} turns, KV for half of them; a turn: {tokens}"


def one_chart(metric: Metric, rows: list[dict[str, Any]], lanes: dict[str, str]) -> str:
    """A figure of all lanes against the number of users."""
    lines = []
    for name, colour in lanes.items():
        points = [point for row in rows if row["lane"] == name if (point := point_of(row, metric.key)) is not None]
        if points:
            lines.append(Line(name, colour, sorted(points, key=lambda point: point.users)))
    return chart(f"{metric.title}, {metric.unit}", metric.unit, lines)


def point_of(row: dict[str, Any], key: str) -> Point | None:
    """None where the row lacks the figure."""
    values = [figures[key] for figures in row["repeats"] if key in figures]
    return Point(row["users"], row["median"][key], min(values), max(values)) if values else None


def table_of(document: dict[str, Any]) -> str:
    """Every figure of every lane."""
    used = [metric for metric in METRICS if any(metric.key in row["median"] for row in document["rows"])]
    heads = "".join(f"<th>{escape(metric.title)}, {metric.unit}</th>" for metric in used)
    rows = []
    for cell, several in by_cell(document).items():
        for place, row in enumerate(several):
            name = escape(cell) if place == 0 else ""
            values = _values(row, several, used)
            first = ' class="first"' if place == 0 else ""
            rows.append(f"<tr{first}><td>{name}</td><td>{escape(row['lane'])}</td>{values}</tr>")
    return f"<table><thead><tr><th>cell</th><th>server</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _values(row: dict[str, Any], several: list[dict[str, Any]], used: list[Metric]) -> str:
    if not row["repeats"]:
        return f'<td class="failed" colspan="{len(used)}">{escape("; ".join(dict.fromkeys(row["failures"])))}</td>'
    cells = []
    for metric in used:
        value = row["median"].get(metric.key)
        is_best = value is not None and value == best(several, metric.key) and len(several) > 1
        text = "-" if value is None else written(value)
        cells.append(f'<td class="best">{text}</td>' if is_best else f"<td>{text}</td>")
    return "".join(cells)


def notes(document: dict[str, Any]) -> list[str]:
    """How it was measured, and who or what is missing."""
    options = document["options"]
    limits = options["limits"]
    drivers = sorted({f"{row['lane']} by {row['driver']}" for row in document["rows"]})
    lines = [
        f"Each user sends {options['requests_per_user']} requests one after the other, none after "
        f"{options['seconds']:g} s; answers are as long as asked for, greedy. Prompts are the same token ids for all servers.",
        f"Goodput counts requests with the first token within {limits['first_token_ms']:,g} ms and "
        f"{limits['inter_token_ms']:,g} ms from token to token. Thin bars in the charts span the repeats.",
        f"The load of the machine before the servers started was {document['machine']['load']:.1f}.",
        "Servers: " + ", ".join(f"{name} {version}".strip() for name, version in document["servers"].items()) + ".",
        "Driven: " + ", ".join(drivers) + ".",
        *(f"{name} took no part: {reason}" for name, reason in document["skipped"].items()),
        *(f"Left out: {sentence}" for sentence in document["left_out"]),
    ]
    return ["<h2>How</h2>", *(f'<p class="note">{escape(line)}</p>' for line in lines)]
