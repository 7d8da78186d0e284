"""The command `python -m backend.convert`, which `./everbatch convert` runs. It exits with 2 for wrong use, 1 for a failure."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from backend.convert.run import ConvertSettings, convert_checkpoint
from backend.models.loader import resolve_model_path
from backend.quant.checkpoint import check_output
from backend.quant.command import console, errors_end_the_command, progress, show_how_to_serve, show_remarks

PERIOD_S = 5.0  # between two lines of progress where there is no terminal


def main(
    model: Annotated[str, typer.Argument()],
    output: Annotated[Path, typer.Option()],
    to: Annotated[str, typer.Option()] = "huggingface",
    dtype: Annotated[str, typer.Option()] = "",
    max_positions: Annotated[int, typer.Option()] = 0,
    rope_factor: Annotated[float, typer.Option()] = 0.0,
    type_name: Annotated[str, typer.Option("--type")] = ConvertSettings().type,
    importance: Annotated[str, typer.Option()] = ConvertSettings().importance,
    tokenizer: Annotated[str, typer.Option()] = ConvertSettings().tokenizer,
) -> None:
    """`deploy/cli.py` names and explains the options; empty and 0 stand for those that were left out."""
    with errors_end_the_command(output):
        if to != "gguf":
            check_output(output)
        given = dtype or None, max_positions or None, rope_factor or None
        wanted = ConvertSettings(to, *given, type_name, importance, tokenizer)
        shown = partial(progress, part="tensor", period_s=PERIOD_S)
        made = convert_checkpoint(resolve_model_path(model), output, wanted, shown)
    show_remarks(made.remarks)
    console.print(f"{made.num_tensors} tensors, {made.num_bytes / 1e6:.1f} MB", highlight=False)
    if to != "meta":
        show_how_to_serve(output)


if __name__ == "__main__":
    typer.run(main)
