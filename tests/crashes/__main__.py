"""`python -m tests.crashes --kills 100 [--streams 64 | --served [--of WHAT]] [--plot FILE]`: kills engines; no byte differs.

The moments are random. Through the Executor, or with --served through a real tritonserver: tritonclient's gRPC and the
OpenAI endpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.crashes.killing import Outcome, run

VICTIMS = ("engine", "stub", "server")


def main() -> int:
    """Exit status 1 where a byte differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.crashes", description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--streams", type=int, help="requests at a time; without it one of each kind (16)")
    parser.add_argument("--served", action="store_true", help="through tritonserver and the OpenAI endpoint")
    parser.add_argument("--of", choices=VICTIMS, default="engine", help="what is killed; with --served")
    parser.add_argument("--plot", type=Path, help="PNG of the pauses")
    arguments = parser.parse_args()
    if arguments.of != "engine" and not arguments.served:
        parser.error("--of stub and --of server need --served")
    if arguments.served:
        from tests.crashes.served import run_served

        outcome = run_served(arguments.kills, arguments.seed, arguments.of)
    else:
        outcome = run(arguments.kills, arguments.seed, arguments.streams)
    _show(outcome)
    if arguments.plot is not None:
        plot(outcome.pauses_s, arguments.plot)
    return 1 if outcome.differences else 0


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
    sys.exit(main())
