"""A progress bar on the standard error stream, where that is a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


def with_bar(items: Iterable[T], total: int, is_shown: bool, console: Console | None = None) -> Iterator[T]:
    """Iterate over the items with a bar that counts those which are done."""
    console = console or Console(stderr=True)
    columns = (TextColumn("Processed requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (is_shown and console.is_terminal)) as progress:
        task = progress.add_task("requests", total=total)
        for item in items:
            yield item
            progress.advance(task)


@contextmanager
def loading(is_shown: bool) -> Iterator[None]:
    """A spinner while the model loads."""
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield
        return
    with console.status("loading the model"):
        yield
