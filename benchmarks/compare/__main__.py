"""Two results of a benchmark side by side: ratios cell by cell, and what changed beyond the spread of the repeats.

    ./everbatch bench compare BEFORE.json AFTER.json
    ./everbatch bench compare BEFORE.json AFTER.json --fail-below 0.95      exit status 1 where a ratio is lower
    ./everbatch bench compare BEFORE.json AFTER.json --only everbatch --only tokens/s     some of the lines

A ratio above 1 means that AFTER is better: more tokens a second, or less time. It reads results of served, load,
speculation and peers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.compare.figures import Key, read
from benchmarks.compare.ratios import Ratio, ratios_of
from benchmarks.harness.called_from import from_caller
from benchmarks.harness.metrics import written
from benchmarks.served.options import in_range
from deploy.errors import UserError

console = Console() if sys.stdout.isatty() else Console(width=150)


def main(
    before: Annotated[Path, typer.Argument(help="Results of the first run, a JSON file.")],
    after: Annotated[Path, typer.Argument(help="Results of the second run.")],
    fail_below: Annotated[
        float | None, typer.Option(help="Exit status 1 if a ratio is lower, such as 0.95.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Lines that hold this text; several: all of them.")
    ] = None,
) -> None:
    """Print a table of ratios; above 1 the second run is better."""
    try:
        if fail_below is not None:
            in_range("--fail-below", fail_below, 0.001, 10)
        first, second = read(from_caller(before)), read(from_caller(after))
        ratios = wanted(ratios_of(first, second), only or [])
    except UserError as error:
        console.print(f"[red]bench compare: {escape(str(error))}[/red]", soft_wrap=True, highlight=False)
        raise typer.Exit(error.exit_code) from None
    console.print(table_of(ratios))
    for sentence in (*on_one_side(set(first), set(second)), summary(ratios)):
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
    lower = [ratio for ratio in ratios if fail_below is not None and ratio.ratio < fail_below]
    if lower:
        console.print(f"[red]{len(lower)} of {len(ratios)} ratios are below {fail_below:g}[/red]", highlight=False)
        raise typer.Exit(1)


def wanted(ratios: Sequence[Ratio], texts: Sequence[str]) -> list[Ratio]:
    """The ratios whose line holds all the texts. Raises UserError when none is left."""
    found = [ratio for ratio in ratios if all(text in " ".join(ratio.key) for text in texts)]
    if not found:
        raise UserError(
            f"none of the {len(ratios)} lines that both files have hold {', '.join(map(repr, texts))}"
            if ratios
            else "the files have no figure in common; give two results of the same benchmark with the same cells"
        )
    return found


def table_of(ratios: Sequence[Ratio]) -> Table:
    """A line a figure; a cell's name and a server's stand where they begin."""
    table = Table(title="ratios: above 1 the second run is better")
    for name in ("cell", "server", "figure"):
        table.add_column(name)
    for name in ("before", "after", "ratio", "spread"):
        table.add_column(name, justify="right")
    table.add_column("beyond it")
    colours = {"better": "green", "worse": "red", "": ""}
    last: Key | None = None
    for ratio in ratios:
        cell, name, figure = ratio.key
        same_cell = last is not None and last.cell == cell
        same_name = same_cell and last is not None and last.name == name
        if last is not None and not same_cell:
            table.add_section()
        spread = "-" if ratio.spread is None else f"{ratio.spread:.0%}"
        table.add_row(
            *(escape(text) for text in ("" if same_cell else cell, "" if same_name else name, figure)),
            *(written(ratio.before), written(ratio.after), f"{ratio.ratio:.2f}", spread, ratio.mark),
            style=colours[ratio.mark],
        )
        last = ratio.key
    return table


def on_one_side(before: set[Key], after: set[Key]) -> list[str]:
    """Cells and servers that one file has alone."""
    sentences = []
    for words, some, others in (("only before", before, after), ("only after", after, before)):
        names = sorted({f"{key.cell}, {key.name}" for key in some} - {f"{key.cell}, {key.name}" for key in others})
        if names:
            sentences.append(f"{words}: {'; '.join(names)}")
    return sentences


def summary(ratios: Sequence[Ratio]) -> str:
    """How many changed, and how many could not be judged."""
    marks = [ratio.mark for ratio in ratios]
    single = sum(ratio.spread is None for ratio in ratios)
    text = f"{len(ratios)} figures: {marks.count('better')} better and {marks.count('worse')} worse beyond the spread"
    return f"{text}; {single} have no repeats, so that their spread is not known" if single else text


if __name__ == "__main__":
    typer.run(main)
