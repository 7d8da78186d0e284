"""The command `python -m backend.quant`, which `./everbatch quantize` runs. It exits with 2 for wrong use, 1 for a failure."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from backend.api.errors import ConfigError
from backend.models.loader import DEFAULT_MODEL, open_directory, resolve_model_path
from backend.quant.checkpoint import check_output
from backend.quant.command import console, errors_end_the_command, progress, show_how_to_serve, show_remarks
from backend.quant.run import Quantised, QuantSettings, check_source, quantize_checkpoint
from backend.quant.text import built_in_texts, read_text, rows_of

NO_CALIBRATION = "none"
KIND_NAMES = {"qkv": "q, k, v", "out": "o", "gate_up": "gate, up", "down": "down"}


def calibration_rows(directory: Path, calibration: str) -> Tensor | None:
    """The calibration text in tokens; None if `calibration` is `none`. Raises ConfigError."""
    if calibration == NO_CALIBRATION:
        return None
    if calibration:
        texts = [read_text(Path(calibration))]
    elif directory.resolve() == DEFAULT_MODEL.resolve():
        texts = built_in_texts()
    else:
        raise ConfigError(
            f"there is no calibration text for {directory.name}: name one with --calibration FILE, of the kind that the "
            f"model will read; --calibration none rounds to nearest without one, which costs quality"
        )
    return rows_of(texts, directory, open_directory(directory).config.max_position)


def show(made: Quantised, wanted: QuantSettings, output: Path) -> None:
    """Print the errors of each kind of layer, the sizes before and after, and how to serve the checkpoint."""
    if made.errors:
        table = Table(title="error of the outputs on the calibration text, mean over the layers")
        table.add_column("linear layer")
        for column in ("rounded to nearest", "smoothed, then the same", "as written"):
            table.add_column(column, justify="right")
        for kind, errors in made.errors.items():
            table.add_row(KIND_NAMES[kind], *(f"{100 * error:.2f} %" for error in errors))
        console.print(table)
    show_remarks(made.remarks)
    before, after = made.bytes_before / 1e6, made.bytes_after / 1e6
    kv = f", KV cache in {wanted.kv}" if wanted.kv else ""
    line = f"{wanted.scheme}{kv}: {before:.1f} MB before, {after:.1f} MB after ({before / after:.2f} times smaller)"
    console.print(line, highlight=False, soft_wrap=True)
    show_how_to_serve(output)


def main(
    model: Annotated[str, typer.Argument()],
    scheme: Annotated[str, typer.Option()],
    output: Annotated[Path, typer.Option()],
    kv: Annotated[str, typer.Option()] = "",
    calibration: Annotated[str, typer.Option()] = "",
    group: Annotated[int, typer.Option()] = 0,
) -> None:
    """`deploy/cli.py` names and explains the options; empty and 0 stand for those that were left out."""
    torch.set_grad_enabled(False)
    wanted = QuantSettings(scheme, group or None, kv or None)
    with errors_end_the_command(output):
        check_output(output)
        directory = resolve_model_path(model)
        check_source(directory, wanted)
        rows = calibration_rows(directory, calibration)
        if rows is not None:
            console.print(f"calibration: {rows.numel()} tokens in {len(rows)} rows", highlight=False)
        made = quantize_checkpoint(directory, output, wanted, rows, partial(progress, part="layer"))
    show(made, wanted, output)


if __name__ == "__main__":
    typer.run(main)
