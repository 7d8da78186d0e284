"""A whole server under everything at once: `python -m tests.soak --minutes 60 [--plot FILE] [--report FILE]`.

Honest clients over gRPC and the OpenAI endpoint (greedy, seeded, penalties, log-probabilities, stop strings, n = 3, a schema),
clients that cancel and leave midway, and malformed requests to every front, while the engine process is killed every two to
three minutes. Every few minutes all clients stop: honest answers must be those of the start, no request and no KV block in use,
and memory, open files, shared memory and the log are measured. Exit status 1 where an answer changed, a process ended by
itself, or something grew from the first third of the rests to the last.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tests.compiled_once import share_native_kernels
from tests.soak.flatness import growth
from tests.soak.soak import Result, soak


def main(
    minutes: Annotated[float, typer.Option(help="How long.")] = 60,
    rest_every: Annotated[float, typer.Option(help="Minutes of work before each rest.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the clients' choices and of the moments of the kills.")] = 0,
    picture: Annotated[Path | None, typer.Option("--plot", help="PNG of what was measured at the rests.")] = None,
    report: Annotated[Path | None, typer.Option(help="JSON of everything that was counted and measured.")] = None,
) -> None:
    """Put a whole server under everything at once. Exit status 1 where anything failed."""
    share_native_kernels()
    with tempfile.TemporaryDirectory(prefix="everbatch-soak-") as directory:
        result = soak(Path(directory), 60 * minutes, 60 * rest_every, seed, partial(print, flush=True))
    show(result)
    if report:
        report.write_text(json.dumps(as_json(result), indent=1))
    if picture:
        plot(result, picture)
    sys.exit(1 if result.failures() else 0)


def show(result: Result) -> None:
    print(f"\n{sum(result.heard.counts.values()):,} requests, {result.num_kills} kills of the engine")
    for name in result.bugs:
        print(f"  tritonserver ended by a bug of its own: {name}")
    for name, number in sorted(result.heard.counts.items()):
        print(f"  {number:8,}  {name}")
    for name, (first, last) in growth(result.samples).items():
        print(f"  {first:8.1f} -> {last:8.1f}  {name}")
    for failure in result.failures()[:40]:
        print(f"failed: {failure}")
    print(f"{len(result.failures())} failures")


def as_json(result: Result) -> dict[str, object]:
    return {
        "kills": result.num_kills,
        "ends by bugs of Triton": result.bugs,
        "pauses_s": [round(last - first, 2) for first, last in result.pauses.spans],
        "requests": dict(result.heard.counts),
        "samples": result.samples,
        "failures": result.failures(),
    }


def plot(result: Result, path: Path) -> None:
    """Memory of each process, and open files, from rest to rest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, files) = pyplot.subplots(1, 2, figsize=(13, 3.6), layout="constrained")
    names = sorted(set.intersection(*map(set, result.samples)) - {"log", "shared memory", "other"})
    for name in names:
        axes = files if name.startswith("descriptors") else memory
        axes.plot([sample[name] for sample in result.samples], label=name.removeprefix("descriptors of "), linewidth=1)
    for axes, title in ((memory, "resident MB"), (files, "open files and sockets")):
        axes.set_title(title)
        axes.set_xlabel("rest")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))  # beside the lines
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
