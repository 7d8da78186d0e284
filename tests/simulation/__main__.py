"""`python -m tests.simulation --seeds 100000 [--start N] [--jobs 2]`: random schedules; a failure is shown shrunk."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Annotated

import typer

from tests.simulation.shrink import failed_seeds, report

CHUNK = 50


def main(
    num_seeds: Annotated[int, typer.Option("--seeds", help="How many schedules.")] = 2000,
    start: Annotated[int, typer.Option(help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Do not stop at the first failure.")] = False,
) -> None:
    """Run random schedules, and show a failure shrunk. Exit status 1 when a seed failed."""
    failed, done, started = [], 0, time.monotonic()
    for seeds in _run_all(start, num_seeds, jobs):
        failed += seeds
        done = min(num_seeds, done + CHUNK)
        _show_progress(done, num_seeds, len(failed), time.monotonic() - started)
        if failed and not keep_going:
            break
    print(file=sys.stderr)
    for seed in failed[:3]:
        print(report(seed))
    print(f"{done} schedules, {len(failed)} failed{': seeds ' + str(failed[:20]) if failed else ''}")
    sys.exit(1 if failed else 0)


def _run_all(start: int, count: int, jobs: int) -> Iterator[list[int]]:
    """Yield the failed seeds of each chunk, in no particular order of chunks."""
    chunks = [range(first, min(first + CHUNK, start + count)) for first in range(start, start + count, CHUNK)]
    if jobs == 1:
        yield from map(failed_seeds, chunks)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(failed_seeds, chunks)


def _show_progress(done: int, total: int, failed: int, elapsed_s: float) -> None:
    eta_s = elapsed_s / done * (total - done)
    line = f"\r{done}/{total} schedules, {failed} failed, {done / elapsed_s:.0f}/s, {eta_s:.0f} s left   "
    print(line, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
