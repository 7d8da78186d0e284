"""How fast one linear layer is, and how far from what the machine could multiply at most.

    ./everbatch bench linear                                          every format, number of rows and instruction set
    ./everbatch bench linear --formats bf16,w8a8 --rows 1,256         some of them
    ./everbatch bench linear --isas avx512bf16,amx --save linear.json

G = 10^9 multiply-adds x 2 a second of `everbatch_linear` alone, which also rounds the inputs; the best of many calls. Each
instruction set is measured in a process of its own. Beside them the peak: a bare loop of the instruction that multiplies such
inputs (native/peak.h). Share = G over that peak.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from ctypes import CDLL, byref
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from backend.layers.linear import QuantizedWeight, Weight
from backend.worker.native_tier import PackLinears
from benchmarks.harness.machine import describe
from kernels.common.rotation import group_of
from kernels.common.rounding import ROUNDED
from kernels.common.super_blocks import FORMS, NL, Kind, SuperBlocks
from kernels.cpu.isa import ISA_VARIABLE, supported_isas
from kernels.cpu.library import load_kernels
from kernels.cpu.linear import PackedLinear
from kernels.cpu.structs import BFLOAT16, FLOAT32, INT8
from kernels.w4a16 import Weight4

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 200_000  # of the peak's loop: some milliseconds
PEAKS = {"f32": FLOAT32, "bf16": BFLOAT16, "int8": INT8}  # type of the inputs -> format of everbatch_multiply
console = Console() if sys.stdout.isatty() else Console(width=150)


class Format(NamedTuple):
    """A way to hold the weight. `make`: (n, k) -> random numbers in it."""

    inputs: str  # a key of PEAKS: the type that is multiplied
    make: Callable[[int, int], Weight]


class Rate(NamedTuple):
    """G of one format on one instruction set."""

    isa: str
    format: str
    peak: float  # G of the bare loop
    rates: list[float]  # for each number of rows

    @property
    def share(self) -> float:
        """Of the peak, at the greatest number of rows."""
        return self.rates[-1] / self.peak


def _floats(dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    return lambda n, k: torch.randn(n, k).half().to(dtype)


def _int8(format: Any, group: int | None) -> Callable[[int, int], QuantizedWeight]:
    def make(n: int, k: int) -> QuantizedWeight:
        columns = group or k
        scales = torch.rand(n, -(-k // columns)).bfloat16().float()
        return QuantizedWeight(torch.randint(-127, 128, (n, k), dtype=torch.int8), scales, columns, format)

    return make


def _rotated(n: int, k: int) -> QuantizedWeight:
    group = group_of(k)
    assert group is not None, "main() refuses such k"
    return _int8("w8a8", group)(n, k)._replace(is_rotated=True)


def _four_bits(group: int) -> Callable[[int, int], Weight4]:
    def make(n: int, k: int) -> Weight4:
        packed = torch.randint(256, (n, k // 2), dtype=torch.uint8)
        groups = k // group, n
        return Weight4(packed, torch.rand(groups).bfloat16(), torch.randint(17, groups).bfloat16(), group)

    return make


def _super_blocks(kind: Kind) -> Callable[[int, int], SuperBlocks]:
    def make(n: int, k: int) -> SuperBlocks:
        form = FORMS[kind]
        groups, blocks = (n, k // form.group), (n, k // (form.columns if form.is_super else form.group))
        return SuperBlocks(
            kind,
            torch.randint(2**form.bits, (n, k), dtype=torch.uint8),
            torch.randint(1, 64, groups, dtype=torch.int8) if form.is_super else None,
            torch.randint(64, groups, dtype=torch.uint8) if form.is_super and form.has_minima else None,
            torch.rand(blocks).to(form.dtype),
            torch.rand(blocks).to(form.dtype) if form.has_minima else None,
            form.values or NL,
        )

    return make


FORMATS = {
    "f32": Format("f32", lambda n, k: torch.randn(n, k)),
    "f16": Format("f32", _floats(torch.float32)),
    "bf16": Format("bf16", _floats(torch.bfloat16)),
    "int8": Format("bf16", _int8("int8", 64)),
    "w8a8": Format("int8", _rotated),  # w8a8 and those of ROUNDED as model.quantization makes them
    "w8a8-32": Format("int8", _int8("w8a8", 32)),
    "w8a8-128": Format("int8", _int8("w8a8", 128)),
    "w8a8-row": Format("int8", _int8("w8a8", None)),
    **{name: Format("int8", _super_blocks(kind)) for name, kind in ROUNDED.items()},
    "awq-128": Format("int8", _four_bits(128)),
    **{kind.lower().replace(" ", "_"): Format("int8", _super_blocks(kind)) for kind in FORMS},
}


def fastest(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of at least three calls, and of as many as fit into `seconds`."""
    best, end, calls = float("inf"), time.perf_counter() + seconds, 0
    while calls < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best, calls = min(best, time.perf_counter() - started), calls + 1
    return best


def peak_of(library: CDLL, inputs: str, threads: int, seconds: float) -> float:
    """G of the bare loop of the instruction that multiplies such inputs."""
    operations = library.everbatch_multiply(PEAKS[inputs], ROUNDS, threads)
    multiply = lambda: library.everbatch_multiply(PEAKS[inputs], ROUNDS, threads)
    return operations / fastest(multiply, seconds) / 1e9


def rates_of(
    call: Callable[[int], Callable[[], object]], n: int, k: int, rows: Sequence[int], seconds: float
) -> list[float]:
    """G for each number of rows. call(rows) makes what is called."""
    return [2 * n * k * count / fastest(call(count), seconds) / 1e9 for count in rows]


def ours(names: Iterable[str], n: int, k: int, rows: Sequence[int], threads: int, seconds: float) -> list[Rate]:
    """Every format on the instruction set that EVERBATCH_ISA names."""
    library = load_kernels(progress=lambda line: print(line, file=sys.stderr))
    measured_peaks = [_peaks(library, threads, seconds)]
    found = {}
    for name in names:
        inputs, make = FORMATS[name]
        layer = PackLinears(library)(make(n, k), None)
        call = partial(_call, library, layer, inputs, threads)
        found[name] = rates_of(call, n, k, rows, seconds)
    measured_peaks.append(_peaks(library, threads, seconds))  # again, for other processes may have disturbed the first
    peaks = {inputs: max(measured[inputs] for measured in measured_peaks) for inputs in PEAKS}
    return [Rate(library.isa, name, peaks[FORMATS[name].inputs], rates) for name, rates in found.items()]


def _peaks(library: CDLL, threads: int, seconds: float) -> dict[str, float]:
    return {inputs: peak_of(library, inputs, threads, seconds) for inputs in PEAKS}


def _call(library: CDLL, layer: PackedLinear, inputs: str, threads: int, rows: int) -> Callable[[], object]:
    n, k = layer.shape
    x, out = torch.randn(rows, k), torch.empty(rows, n)
    width = 4 if inputs == "f32" else 2
    return lambda: library.everbatch_linear(byref(layer.struct), x.data_ptr(), rows, width, out.data_ptr(), threads)


def in_process(isa: str, arguments: Sequence[str]) -> list[Rate]:
    """The rates of one instruction set, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.linear", *arguments, "--measure", isa]
    environment = os.environ | {ISA_VARIABLE: isa}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{isa} cannot be measured, see above; leave it out by --isas")
    return [Rate(*rate) for rate in json.loads(done.stdout.splitlines()[-1])]


def table_of(rates: Sequence[Rate], rows: Sequence[int], title: str) -> Table:
    """A line for each format: G for each number of rows, the peak, and the share of it at the most rows."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("instructions", "weights"):
        table.add_column(name, no_wrap=True)
    for name in (*(f"{count} rows" for count in rows), "peak", f"share at {rows[-1]}"):
        table.add_column(name, justify="right", no_wrap=True)
    for rate, following in zip(rates, [*rates[1:], None], strict=True):
        is_last = following is not None and following.isa != rate.isa
        cells = (f"{value:,.1f}" for value in rate.rates)
        table.add_row(rate.isa, rate.format, *cells, f"{rate.peak:,.1f}", f"{rate.share:.0%}", end_section=is_last)
    return table


def _names(text: str, known: Iterable[str], option: str) -> list[str]:
    """The comma-separated names of an option. Raises BadParameter for one that is not known."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in set(known)]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}; name some of these", param_hint=option)
    return names


def _numbers(text: str) -> list[int]:
    """The numbers of --rows, rising. Raises BadParameter."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not 1 <= numbers[0] <= numbers[-1] <= 4096:
        raise typer.BadParameter(
            f"{text!r} are not numbers of 1 to 4,096 with commas between them", param_hint="--rows"
        )
    return numbers


def main(
    n: Annotated[int, typer.Option(help="Outputs of the layer.", min=32, max=1 << 17)] = 6656,
    k: Annotated[
        int,
        typer.Option(help="Inputs of the layer; formats in super-blocks need a multiple of 256.", min=128, max=1 << 16),
    ] = 1280,
    rows: Annotated[str, typer.Option(help="Numbers of rows of the input.")] = "1,2,4,8,16,32,128,256",
    formats: Annotated[str, typer.Option(help="Of the weight, from " + ", ".join(FORMATS) + ".")] = ",".join(FORMATS),
    isas: Annotated[str, typer.Option(help="Instruction sets; without it all that this machine has.")] = "",
    threads: Annotated[int, typer.Option(help="Of a product.", min=1)] = len(os.sched_getaffinity(0)),
    seconds: Annotated[float, typer.Option(help="Of each measurement, at least.", min=0.0)] = 0.2,
    save: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    measure: Annotated[str, typer.Option(hidden=True, help="Measure this one in this process, and print JSON.")] = "",
) -> None:
    """Measure one layer in every format, and print a table."""
    counts, names = _numbers(rows), _names(formats, FORMATS, "--formats")
    made = [FORMATS[name].make(32, 256) for name in names]
    unit = max([128, *(weight.form.columns for weight in made if isinstance(weight, SuperBlocks))])
    if k % unit:
        raise typer.BadParameter(f"{k} is no multiple of {unit}; use {-(-k // unit) * unit}", param_hint="--k")
    if measure:
        measured = ours(names, n, k, counts, threads, seconds)
        print(json.dumps(measured))
        return
    chosen = _names(isas, supported_isas(), "--isas") if isas else supported_isas()
    passed = {"--n": n, "--k": k, "--rows": rows, "--formats": formats, "--threads": threads, "--seconds": seconds}
    arguments = [str(word) for pair in passed.items() for word in pair]
    rates = [rate for isa in chosen for rate in in_process(isa, arguments)]
    machine = describe()
    title = f"G of a layer of {n:,} x {k:,}, {threads} threads; {machine.summary}"
    console.print(table_of(rates, counts, title))
    if save:
        document = {"machine": machine._asdict(), "n": n, "k": k, "threads": threads, "rows": counts}
        document["measured"] = [rate._asdict() | {"share": rate.share} for rate in rates]
        save.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
