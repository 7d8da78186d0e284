"""How long a model takes to load on the native tier: packed, packed and kept on disk, and mapped by later starts.

    python -m benchmarks.loading                            shape L with random weights, in each format
    python -m benchmarks.loading --shape M --formats w4a8   another size, one format
    python -m benchmarks.loading --model-dir DIR            your checkpoint

Seconds from the checkpoint's path to a tier that can run a step, without Python's imports. `packed`: nothing is kept. `first`:
the checkpoint's content is hashed, and the packed weights are written and mapped. `cold`: a later start, after Linux has dropped
the pages of all files. `warm`: the best of later starts.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from backend.api.config.schema import KvCacheConfig, ModelConfigSection
from backend.models import loader
from backend.worker import fingerprint
from backend.worker.loaded_model import LoadedModel
from kernels.cpu.library import load_kernels
from tools.make_random_model import make_random_model

BLOCK_SIZE = 32
FORMATS = {"bf16": "none", "w8a8": "w8a8", "w4a8": "w4a8"}
WARM = 3


def seconds(path: Path, cache: Path, format: str, max_gb: float) -> tuple[float, int]:
    """To load the model, and how many of its bytes are mapped."""
    section = ModelConfigSection(
        str(path),
        "bfloat16",
        "cpu",
        kernels="native",
        quantization=FORMATS[format],
        cache_dir=str(cache),
        cache_max_gb=max_gb,
    )
    gc.collect()
    started = time.perf_counter()
    loaded = LoadedModel(loader.open_directory(path), section, KvCacheConfig(), torch.device("cpu"))
    loaded.tier(BLOCK_SIZE)
    return time.perf_counter() - started, loaded.mapped_bytes


def drop_pages(*directories: Path) -> None:
    """Have Linux forget what it holds of the files in them."""
    for file in (each for directory in directories for each in directory.iterdir() if each.is_file()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(path: Path, cache: Path, format: str, max_gb: float) -> list[str]:
    """A row of the table."""
    packed, _ = seconds(path, cache, format, 0)
    first, num_bytes = seconds(path, cache, format, max_gb)
    if not num_bytes:
        raise typer.BadParameter(f"the model cannot be kept in {cache}; see the log line above")
    drop_pages(cache, path)
    cold, _ = seconds(path, cache, format, max_gb)
    warm = min(seconds(path, cache, format, max_gb)[0] for _ in range(WARM))
    return [format, f"{num_bytes / 1e9:.2f}", *(f"{value:.2f}" for value in (packed, first, cold, warm))]


def main(
    model_dir: Annotated[Path | None, typer.Option(help="Checkpoint directory; without it one is made.")] = None,
    shape: Annotated[str, typer.Option(help="Of random weights: S, M or L.")] = "L",
    formats: Annotated[str, typer.Option(help="From " + ", ".join(FORMATS) + ".")] = ",".join(FORMATS),
    threads: Annotated[int, typer.Option(help="Of the process.", min=1)] = len(os.sched_getaffinity(0)),
    max_gb: Annotated[float, typer.Option(help="model.cache_max_gb.")] = 20.0,
) -> None:
    """Measure one model in several formats, and print a table."""
    chosen = formats.split(",")
    if unknown := set(chosen) - set(FORMATS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))} is no format; use {', '.join(FORMATS)}")
    torch.set_num_threads(threads)
    kernels = load_kernels(progress=print)
    table = Table(title=f"seconds to load {model_dir or shape}, {threads} threads, {kernels.isa}")
    for name in ("weights", "GB kept", "packed", "first", "cold", "warm"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory(prefix="everbatch-loading-") as place:
        path = model_dir or make_random_model(Path(place) / "model", shape=shape)
        cache = Path(place) / "weights"
        if model_dir is None:  # a checkpoint that has just been made is read again at each start
            time.sleep(fingerprint.SETTLED_S + 1)
        for format in chosen:
            table.add_row(*measure(path, cache, format, max_gb))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
