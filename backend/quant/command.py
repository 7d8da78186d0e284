"""What the commands that make checkpoints share on a terminal: progress, and errors as one sentence with an exit status."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape

from backend.api.errors import ConfigError

console = Console()
T = TypeVar("T")


def progress(parts: Sequence[T], part: str, period_s: float = 0.0) -> Iterator[T]:
    """Yield each one and print how far it is: on a terminal in one line that is rewritten, elsewhere in new lines, with at least
    `period_s` between two of them. `part`: the noun for one of them.
    """
    total = len(parts)
    if not console.is_terminal:
        due = 0.0
        for index, each in enumerate(parts):
            if time.monotonic() >= due:
                due = time.monotonic() + period_s
                console.print(f"{part} {index + 1} of {total}", highlight=False)
            yield each
        return
    with console.status("") as status:
        for index, each in enumerate(parts):
            status.update(f"{part} {index + 1} of {total}")
            yield each


@contextmanager
def errors_end_the_command(output: Path) -> Iterator[None]:
    """Print an error and exit: with 2 for wrong use, 130 after Ctrl-C or SIGTERM, 1 where `output` cannot be written."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except ConfigError as error:
        _end(str(error), 2)
    except KeyboardInterrupt:
        Console(stderr=True).print("everbatch: stopped; nothing was written", highlight=False)
        sys.exit(130)
    except OSError as error:
        _end(f"{output} cannot be written ({error.strerror or error}); free space, or name another folder", 1)


def _end(sentence: str, status: int) -> None:
    Console(stderr=True).print(f"[red]everbatch: {escape(sentence)}[/red]", highlight=False, soft_wrap=True)
    sys.exit(status)


def show_remarks(remarks: Sequence[str]) -> None:
    for remark in remarks:
        console.print(remark, highlight=False, soft_wrap=True, markup=False)


def show_how_to_serve(output: Path) -> None:
    console.print(f"serve it with: ./everbatch serve --model {output}", highlight=False, soft_wrap=True, markup=False)
