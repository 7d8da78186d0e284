"""This engine beside OpenVINO GenAI, llama.cpp, ik_llama.cpp, vLLM and transformers: same models, prompts, threads, in one run.

    ./everbatch bench peers                                    the shapes M and L of random weights, bf16
    ./everbatch bench peers --shapes E --peers llamacpp        a mixture of experts; a roof counts the experts that are read
    ./everbatch bench peers --model-dir DIR --weights int8     any checkpoint of the Llama family, or of a mixture
    ./everbatch bench peers --model-dir FILE.gguf              a GGUF file, which every engine that can reads as it is
    ./everbatch bench peers --weights int4                     4 bits: Q4_0, Q4_K_M and IQ4_NL, OpenVINO's groups of 128, our w4a8
    ./everbatch bench peers --weights int4 --shapes L --concurrency 8 --peers ik_llamacpp:q4_0,openvino --add
                                                               some peers, added to what earlier runs have measured
    ./everbatch bench peers --prompt 16,16,16,1000             short prompts and long ones together
    ./everbatch bench peers --shapes M-long --prompt 8192 --concurrency 1,8 --new 32     long contexts
    ./everbatch bench peers --busy 1                           beside another process that wants a core

Every engine is a process of its own environment (made on first use, .run/bench). All are loaded, and for each concurrency and
repeat each is measured in turn while the others are stopped. Decode tokens/s: tokens that come after every request has its first
one, over that time. Prefill tokens/s: all prompt tokens over the time until then (in which requests with shorter prompts may have
begun to generate). Output tokens/s: all generated tokens over the whole time. Prompts are random and new in each repeat,
decoding is greedy, no end token ends it, no prefix is reused. Ratios compare the best of the repeats on both sides.
What bits cost in quality, beside llama.cpp's types: ./everbatch bench quality --model DIR --peers llamacpp.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from benchmarks.harness.machine import cpu_name
from benchmarks.peers import collected, environments, models
from benchmarks.peers.commands import CommandFailed
from benchmarks.peers.engines import FILE, PEERS, EngineSpec, chosen, ours
from benchmarks.peers.errors import Skipped
from benchmarks.peers.measure import Contestant, Outcome, Work, measure
from benchmarks.peers.plot import plot
from benchmarks.peers.rows import Row, make_rows
from benchmarks.peers.table import make_table, reasons
from deploy.errors import UserError
from deploy.progress import SteppedProgress

RESULTS = Path(__file__).resolve().parents[1] / "results"
console = Console() if sys.stdout.isatty() else Console(width=120)


def main(
    model_dir: Annotated[
        Path | None, typer.Option(help="Checkpoint directory or GGUF file; without it the shapes are made.")
    ] = None,
    shapes: Annotated[str, typer.Option(help="Of random weights, from " + ", ".join(models.SHAPES) + ".")] = "M,L",
    weights: Annotated[
        Literal["bf16", "int8", "int4"], typer.Option(help="How every engine holds the weights.")
    ] = "bf16",
    concurrency: Annotated[str, typer.Option(help="Requests at once.")] = "1,8,32",
    prompt: Annotated[str, typer.Option(help="Tokens of a prompt; requests take several lengths in turn.")] = "128",
    new: Annotated[int, typer.Option(help="Tokens that a request generates.", min=2)] = 128,
    repeats: Annotated[int, typer.Option(help="Measurements of each engine at each concurrency.", min=1)] = 5,
    peers: Annotated[
        str, typer.Option(help="From " + ", ".join(PEERS) + "; PEER:SETTING for one of its settings.")
    ] = ",".join(PEERS),
    threads: Annotated[int | None, typer.Option(help="Of every engine; all cores without it.", min=1)] = None,
    busy: Annotated[int, typer.Option(help="Other processes that keep a core busy all the while.", min=0)] = 0,
    our_int8: Annotated[Literal["w8a8", "int8"], typer.Option(help="Our model.quantization with int8.")] = "w8a8",
    our_int4: Annotated[Literal["w4a8"], typer.Option(help="Our model.quantization with int4.")] = "w4a8",
    add: Annotated[
        bool, typer.Option("--add", help="Add to what earlier runs of the same kind have measured.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write one JSON object a row to this file.")] = None,
) -> None:
    """Measure this engine and its peers side by side; write a table, a plot and the figures."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # runners are ended with us
    progress = SteppedProgress()
    try:
        prompts = tuple(whole_numbers(prompt, "--prompt"))
        concurrencies = tuple(sorted(set(whole_numbers(concurrency, "--concurrency"))))
        made = [] if model_dir is not None else choices(shapes, models.SHAPES, "--shapes")
        given = None if model_dir is None else models.of_directory(model_dir)
        held = FILE if isinstance(given, models.GgufModel) else weights
        engines = [ours(our_int8, our_int4), *chosen(listed(peers), held)]
        with alone():
            rows: list[Row] = []
            for shape in made or [None]:
                model = models.of_shape(shape, progress) if shape else given
                work = Work(model, held, concurrencies, prompts, new, repeats, threads or num_cores(), busy)
                check(work)
                rows += compare(work, engines, progress, add)
                if json_file is not None:
                    json_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except UserError as error:
        console.print(f"[red]bench peers: {error}[/red]", soft_wrap=True)
        raise typer.Exit(error.exit_code) from None
    except CommandFailed as error:
        console.print(f"[red]bench peers: {error}[/red]", soft_wrap=True)
        raise typer.Exit(1) from None


def compare(work: Work, engines: list[EngineSpec], progress: SteppedProgress, add: bool = False) -> list[Row]:
    """Measure one model and show and write what came out, with `add` together with earlier results. Returns the rows."""
    name = f"peers-{work.model.name}-{work.weights}{'-mixed' if len(work.prompts) > 1 else ''}{'-busy' if work.busy else ''}"
    before = collected.earlier(RESULTS / f"{name}.json", work) if add else []
    contestants = [contestant for engine in engines for contestant in prepare(engine, work, progress)]
    interrupted: KeyboardInterrupt | None = None
    try:
        outcome = measure(work, contestants, progress)
    except KeyboardInterrupt as interrupt:  # with --add, what was measured until then is kept
        if not add:
            raise
        outcome, interrupted = Outcome(contestants, alternated=True), interrupt
    if before:
        outcome = Outcome(collected.merged(before, outcome.contestants), outcome.alternated)
        work = replace(work, concurrencies=collected.concurrencies_of(outcome.contestants))
    rows = make_rows(work, outcome)
    prompts = ", ".join(map(str, work.prompts))
    busy = f"{work.busy} busy neighbours, " if work.busy else ""
    order = "alternating" if outcome.alternated else "one engine after the other"
    title = (
        f"{work.model.name} {work.weights}: {prompts} prompt + {work.new} new tokens, best of {most_repeats(rows)}, "
        f"{work.threads} threads, {busy}{order}, {read_bandwidth(outcome.bandwidths)} read"
    )
    console.print(make_table(rows, title))
    for reason in reasons(rows):
        console.print(reason, soft_wrap=True, highlight=False)
    RESULTS.mkdir(exist_ok=True)
    measured = collected.to_json(work, outcome.contestants)
    document = {"cpu": cpu_name(), "cores": num_cores(), "rows": rows, "measured": measured}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    plot(rows, RESULTS / f"{name}.png", title)
    console.print(f"written: benchmarks/results/{name}.json and .png")
    if interrupted is not None:
        raise interrupted
    return rows


def most_repeats(rows: Sequence[Row]) -> int:
    """The measurements of the row that has most; runs that were added may have had different numbers."""
    return max(row["repeats"] for row in rows)


def read_bandwidth(bandwidths: Sequence[float]) -> str:
    """`33.1 - 35.4 GB/s`, the least and the greatest; nothing measured: `no GB/s`."""
    return f"{min(bandwidths) / 1e9:.1f} - {max(bandwidths) / 1e9:.1f} GB/s" if bandwidths else "no GB/s"


def prepare(engine: EngineSpec, work: Work, progress: SteppedProgress) -> list[Contestant]:
    """An engine in each of its settings, installed and with the model in its form; or one contestant that is skipped."""
    settings = engine.settings.get(work.weights)
    if not settings:
        return [Contestant(engine, "", skipped=engine.lacks)]
    found = []
    try:
        python = environments.python_of(engine, progress)
        converter = environments.python_of(PEERS[engine.converter], progress) if engine.converter else python
        for setting in settings:
            form = models.form_for(engine, converter, work.model, work.weights, setting, progress)
            found.append(Contestant(engine, setting, python=python, form=form))
    except Skipped as reason:
        progress.step(f"{engine.name} is skipped: {reason}")
        return [Contestant(engine, settings[0], skipped=str(reason))]
    return found


def check(work: Work) -> None:
    """Raise UserError for what the model cannot do."""
    if work.max_length > work.model.max_length:
        raise UserError(
            f"--prompt {max(work.prompts)} and --new {work.new} are more than the {work.model.max_length} tokens of "
            f"{work.model.name}; ask for fewer"
        )


def whole_numbers(text: str, option: str) -> list[int]:
    """Parses `1,8,32` as numbers. Raises UserError."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise UserError(f"{option} is {text!r}; write numbers from 1 on, separated by commas, such as 1,8,32")
    return numbers


def listed(text: str) -> list[str]:
    """Parses `M,L` as names, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def choices(text: str, known: Collection[str], option: str) -> list[str]:
    """Parses `M,L` as names of known ones. Raises UserError."""
    names = listed(text)
    for name in names:
        if name not in known:
            raise UserError(f"{option} has {name!r}; choose from {', '.join(known)}, separated by commas")
    return names


@contextmanager
def alone() -> Iterator[None]:
    """Keep a second run out: two at once would measure each other. Raises UserError."""
    environments.BENCH.mkdir(parents=True, exist_ok=True)
    with open(environments.BENCH / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another `bench peers` or `bench served` runs in this checkout; wait until it has ended"
            ) from None
        yield


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    try:
        typer.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
