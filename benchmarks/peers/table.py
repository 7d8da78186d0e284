"""Rows as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from benchmarks.peers.engines import OURS, PEERS
from benchmarks.peers.rows import Row

# heading, key of a row, format
COLUMNS = (
    ("decode\ntok/s", "decode_tokens_per_s", "{:,.1f}"),
    ("\nmedian", "median_decode_tokens_per_s", "{:,.1f}"),
    ("\nratio", "ratio_to_best_peer", "{:.2f}"),
    ("of\nmedians", "median_ratio_to_best_peer", "{:.2f}"),
    ("of\nroof", "roof_fraction", "{:.2f}"),
    ("prefill\ntok/s", "prefill_tokens_per_s", "{:,.0f}"),
    ("\nratio", "prefill_ratio_to_best_peer", "{:.2f}"),
    ("output\ntok/s", "output_tokens_per_s", "{:,.0f}"),
    ("\nratio", "output_ratio_to_best_peer", "{:.2f}"),
    ("load\ns", "load_s", "{:.1f}"),
    ("RSS\nGiB", "peak_rss_gib", "{:.2f}"),
)


def make_table(rows: Sequence[Row], title: str) -> Table:
    """One line a row, and one for each further setting; a rule between concurrencies. Ratios are to the best peer.

    Skipped engines have no figures.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("at\nonce", justify="right", no_wrap=True)
    table.add_column("\nengine", no_wrap=True)
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None]):
        cells = [cell(row[key], form) for _, key, form in COLUMNS]
        last = following is not None and following["concurrency"] != row["concurrency"]
        others = [name for name in row["settings"] if name != row["setting"]]
        style = "bold" if row["engine"] == OURS else ""
        table.add_row(str(row["concurrency"]), shown(row), *cells, style=style, end_section=last and not others)
        for name in others:
            cells = [cell(row["settings"][name].get(key), form) for _, key, form in COLUMNS]
            table.add_row("", f"  ({name})", *cells, style="dim", end_section=last and name == others[-1])
    return table


def shown(row: Row) -> str:
    """The engine's name, with the setting where it has several for such weights."""
    peer = PEERS.get(row["engine"])
    several = peer is not None and len(peer.settings.get(row["weights"], ())) > 1
    return f"{row['engine']} ({row['setting']})" if several and row["settings"] else row["engine"]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why engines were skipped, a sentence for each."""
    return list(dict.fromkeys(f"{row['engine']} is skipped: {row['skipped']}" for row in rows if row["skipped"]))


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
