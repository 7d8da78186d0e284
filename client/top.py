"""`everbatch top`: the persistent batch, the queue and the KV cache of a server in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from client.errors import ClientError

View = dict[str, Any]  # a LiveView of the server, as JSON (backend/api/live_view.py)
FREE, CACHED = -2, -1  # states in View["blocks"]
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")  # for running sequences; beyond six they are used again
SNAPSHOT_COLOUR = "blue"
FREE_COLOUR, CACHED_COLOUR, IDLE_COLOUR = "grey23", "grey50", "grey70"
UPPER_HALF = "\u2580"  # one character shows two cells: its colour and its background
MAP_LINES = 8  # the most lines of the map of the KV pool
BAR = 24  # characters
# Columns of rows that a narrow terminal goes without, these first.
LEAST_WORTH = ("client", "recomputed", "blocks", "reused", "age", "prompt", "progress")
RATES = {
    "generated_tokens_total": "output tokens/s",
    "context_tokens_total": "prompt tokens/s",
    "recomputed_tokens_total": "recomputed tokens/s",
    "sequences_evicted_total": "evictions/s",
}


class Rates:
    """Changes a second of the counters between two views of the same engine."""

    def __init__(self) -> None:
        self._before: View | None = None

    def take(self, view: View) -> dict[str, float]:
        """0 for the first view, and for the first one of another engine."""
        before, self._before = self._before, view
        if before is None or before["engine"] != view["engine"]:
            return dict.fromkeys(RATES, 0.0)
        seconds = max(view["uptime_s"] - before["uptime_s"], 1e-3)
        return {name: (view["counters"][name] - before["counters"][name]) / seconds for name in RATES}


class BlockMap:
    """The KV pool as a map: two cells a character, one above the other, each in the colour of its state."""

    def __init__(self, view: View) -> None:
        runs = view["blocks"]
        self._states = [state for state, number in zip(runs[::2], runs[1::2], strict=True) for _ in range(number)]
        self._num_rows = len(view["rows"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width, 1)
        step = (
            -(-len(self._states) // (2 * MAP_LINES * width)) or 1
        )  # where there is no room, one cell of so many is shown
        states = self._states[::step]
        for start in range(0, len(states), 2 * width):
            upper, lower = states[start : start + width], states[start + width : start + 2 * width]
            line = Text(no_wrap=True)
            for index, state in enumerate(upper):
                below = f" on {self._colour(lower[index])}" if index < len(lower) else ""
                line.append(UPPER_HALF, f"{self._colour(state)}{below}")
            yield line

    def _colour(self, state: int) -> str:
        if state >= self._num_rows:
            return IDLE_COLOUR
        return {FREE: FREE_COLOUR, CACHED: CACHED_COLOUR}.get(state) or COLOURS[state % len(COLOURS)]


def page(view: View, rates: dict[str, float], server: str = "") -> RenderableType:
    """Draw one view; `server` says whose it is."""
    return Group(_head(view, rates, server), "", _pool(view), BlockMap(view), "", Rows(view), _queue(view))


def _head(view: View, rates: dict[str, float], server: str) -> RenderableType:
    latest, first, between = view["latest"], view["first_token_s"], view["per_token_s"]
    figures = Figures((f"{rates[name]:,.0f}", label) for name, label in RATES.items())
    state = Figures(
        (
            (f"{len(view['rows'])} of {latest['max_num_active_requests']}", "slots"),
            (f"{view['num_queued']}", "waiting"),
            (f"{view['num_sessions']}", "sessions"),
            (f"{1000 * first['p50']:,.0f} / {1000 * first['p99']:,.0f} ms", "first token p50 / p99"),
            (f"{1000 * between['p50']:,.1f} / {1000 * between['p99']:,.1f} ms", "a token p50 / p99"),
        )
    )
    engine = Text(f"engine {view['engine']}, up {_duration(view['uptime_s'])}", "dim")
    return Group(*([Text(server, "dim")] if server else []), engine, figures, state)


class Figures:
    """Figures with their labels; where a line is full, the next one goes on with a whole figure."""

    def __init__(self, figures: Iterable[tuple[str, str]]) -> None:
        self._figures = [Text(figure, "bold").append(f" {label}   ", "dim") for figure, label in figures]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for figure in self._figures:
            if line and line.cell_len + len(figure.plain.rstrip()) > options.max_width:
                yield line
                line = Text()
            line.append_text(figure)
        yield line


def _pool(view: View) -> Text:
    cache, cell = view["latest"]["kv_cache"], view["blocks_per_cell"]
    text = Text()
    for count, label, colour in (
        (cache["used_num_blocks"], "in use", COLOURS[0]),
        (cache["cached_num_blocks"], "cached", CACHED_COLOUR),
        (cache["free_num_blocks"], "free", FREE_COLOUR),
    ):
        text.append("\u25a0 ", colour).append(f"{count:,}", "bold").append(f" {label}   ", "dim")
    text.append(f"of {view['num_blocks']:,} KV blocks" + (f", {cell} to a cell" if cell > 1 else ""), "dim")
    snapshots = view["latest"].get("snapshots")
    if snapshots and snapshots["max_num_snapshots"]:  # the model has recurrent layers
        used, most = snapshots["used_num_snapshots"], snapshots["max_num_snapshots"]
        text.append("   \u25a0 ", SNAPSHOT_COLOUR).append(f"{used:,}", "bold").append(
            f" of {most:,} snapshots of states", "dim"
        )
    return text


class Rows:
    """The running requests as a table, with as many columns as there is room for."""

    def __init__(self, view: View) -> None:
        self._rows = view["rows"]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number in range(len(LEAST_WORTH) + 1):
            table = self._table(without=LEAST_WORTH[:number])
            if Measurement.get(console, options.update(max_width=10_000), table).maximum <= options.max_width:
                break
        yield table

    def _table(self, without: Sequence[str]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        cells = [{name: cell for name, cell in each.items() if name not in without} for each in self._cells()]
        for name in next(iter(cells), {}):
            is_number = name in ("prompt", "output", "reused", "recomputed", "blocks", "age")
            table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
        for row in cells:
            table.add_row(*row.values())
        return table

    def _cells(self) -> Iterator[dict[str, str | Text]]:
        """For each row its cells, by the names of their columns."""
        for index, row in enumerate(self._rows):
            yield {
                "": Text("\u25a0", COLOURS[index % len(COLOURS)]),
                "request": row["id"],
                "client": row.get("session") or row.get("namespace") or "-",
                "stage": row["stage"],
                "progress": _bar(row),
                "prompt": f"{row['num_prompt_tokens']:,}",
                "output": f"{row['num_output_tokens']:,} / {row['max_output_tokens']:,}",
                "reused": f"{row.get('num_cached_tokens', 0):,}",
                "recomputed": f"{row.get('num_recomputed_tokens', 0):,}",
                "blocks": f"{row.get('num_blocks', 0):,}",
                "age": _duration(row.get("age_s", 0.0)),
            }


def _queue(view: View) -> Text:
    waiting = [f"{row['id']} ({row['num_prompt_tokens']:,} tokens, {row['stage']})" for row in view["queue"][:5]]
    more = view["num_queued"] - len(waiting)
    return (
        Text("waiting: " + ", ".join(waiting) + (f" and {more:,} more" if more > 0 else ""), "dim")
        if waiting
        else Text()
    )


def _bar(row: View) -> Text:
    """The prompt's progress in the context phase, then that of the output."""
    in_context = row["stage"] == "context"
    done, whole = (
        (row["num_computed_tokens"], row["num_prompt_tokens"])
        if in_context
        else (row["num_output_tokens"], row["max_output_tokens"])
    )
    filled = min(BAR, BAR * done // max(whole, 1))
    return Text("\u2501" * filled, "yellow" if in_context else "green").append("\u2501" * (BAR - filled), "grey23")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{minutes} min" if minutes < 60 else f"{hours} h {minutes % 60} min"


def watch(look: Callable[[], View], console: Console, period_s: float, server: str = "") -> None:
    """Draw until Ctrl-C. While no answer comes the page says why, and the server is asked again."""
    rates = Rates()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                view = look()
                live.update(page(view, rates.take(view), server), refresh=True)
            except ClientError as error:
                live.update(Text(f"no answer: {error}", "red"), refresh=True)
            time.sleep(period_s)


def once(look: Callable[[], View], console: Console, server: str = "") -> None:
    """Draw one page. Rates are of the half second between two looks."""
    rates = Rates()
    rates.take(look())
    time.sleep(0.5)
    view = look()
    console.print(page(view, rates.take(view), server))
