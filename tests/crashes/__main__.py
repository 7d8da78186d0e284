"""`python -m tests.crashes --kills 100 [--streams 64 | --served [--of WHAT]] [--plot FILE]`: kills engines; no byte differs.

The moments are random. Through the Executor, or with --served through a real tritonserver: tritonclient's gRPC and the
OpenAI endpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from tests.crashes.killing import Outcome, run

Victim = Literal["engine", "stub", "server"]


def main(
    kills: Annotated[int, typer.Option(help="How many.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    streams: Annotated[int | None, typer.Option(help="Requests at a time; without it one of each kind (16).")] = None,
    is_served: Annotated[bool, typer.Option("--served", help="Through tritonserver and the OpenAI endpoint.")] = False,
    victim: Annotated[Victim, typer.Option("--of", help="What is killed; with --served.")] = "engine",
    picture: Annotated[Path | None, typer.Option("--plot", help="PNG of the pauses.")] = None,
) -> None:
    """Kill engines at random moments. Exit status 1 where a byte differs."""
    if victim != "engine" and not is_served:
        raise typer.BadParameter("--of stub and --of server need --served")
    if is_served:
        from tests.crashes.served import run_served

        outcome = run_served(kills, seed, victim)
    else:
        outcome = run(kills, seed, streams)
    _show(outcome)
    if picture is not None:
        plot(outcome.pauses_s, picture)
    sys.exit(1 if outcome.differences else 0)


def _show(outcome: Outcome) -> None:
    pauses = sorted(outcome.pauses_s)
    print(f"{outcome.num_kills} kills, {outcome.num_requests} requests, {len(outcome.differences)} with other bytes")
    print(f"{outcome.num_adopted} KV blocks of a killed engine were used by the next one")
    for name, number in sorted(outcome.num_cut.items()):
        print(f"  {name}: {number} times in its midst")
    for difference in outcome.differences[:20]:
        print(f"  differs: {difference}")
    if pauses:
        print(f"pauses: least {pauses[0]:.2f} s, median {pauses[len(pauses) // 2]:.2f} s, greatest {pauses[-1]:.2f} s")


def plot(pauses_s: list[float], path: Path) -> None:
    """How many of the pauses were so short."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    ordered = sorted(pauses_s)
    axes.step([0.0, *ordered], [0.0, *(100 * (n + 1) / len(ordered) for n in range(len(ordered)))], where="post")
    axes.set_xlabel("seconds from the kill to the next token of any stream")
    axes.set_ylabel("% of the kills")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
