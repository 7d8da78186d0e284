"""The command `python -m backend.convert`, which `./everbatch convert` runs. It exits with 2 for wrong use, 1 for a failure."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from backend.api.errors import ConfigError
from backend.convert.run import ConvertSettings, convert_checkpoint
from backend.models.loader import resolve_model_path
from backend.quant.checkpoint import check_output

PERIOD_S = 5.0  # between two lines of progress where there is no terminal
console = Console()


def progress(names: Sequence[str]) -> Iterator[str]:
    """Yield each name and print how far it is: on a terminal in one line that is rewritten, elsewhere a line now and then."""
    total = len(names)
    if not console.is_terminal:
        due = 0.0
        for index, name in enumerate(names):
            if time.monotonic() >= due:
                due = time.monotonic() + PERIOD_S
                console.print(f"tensor {index + 1} of {total}", highlight=False)
            yield name
        return
    with console.status("") as status:
        for index, name in enumerate(names):
            status.update(f"tensor {index + 1} of {total}")
            yield name


def main(
    model: Annotated[str, typer.Argument()],
    output: Annotated[Path, typer.Option()],
    to: Annotated[str, typer.Option()] = "huggingface",
    dtype: Annotated[str, typer.Option()] = "",
    max_positions: Annotated[int, typer.Option()] = 0,
    rope_factor: Annotated[float, typer.Option()] = 0.0,
) -> None:
    """`deploy/cli.py` names and explains the options; empty and 0 stand for those that were left out."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check_output(output)
        wanted = ConvertSettings(to, dtype or None, max_positions or None, rope_factor or None)
        made = convert_checkpoint(resolve_model_path(model), output, wanted, progress)
    except ConfigError as error:
        Console(stderr=True).print(f"[red]everbatch: {escape(str(error))}[/red]", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("everbatch: stopped; nothing was written", highlight=False)
        sys.exit(130)
    except OSError as error:
        text = f"{output} cannot be written ({error.strerror or error}); free space, or name another folder"
        Console(stderr=True).print(f"[red]everbatch: {escape(text)}[/red]", highlight=False, soft_wrap=True)
        sys.exit(1)
    for remark in made.remarks:
        console.print(remark, highlight=False, soft_wrap=True, markup=False)
    console.print(f"{made.num_tensors} tensors, {made.num_bytes / 1e6:.1f} MB", highlight=False)
    if to == "huggingface":
        console.print(
            f"serve it with: ./everbatch serve --model {output}", highlight=False, soft_wrap=True, markup=False
        )


if __name__ == "__main__":
    typer.run(main)
