"""`python -m tests.simulation.server --seeds 1000000 --jobs 2`: lives of a whole server; a failure is shown shrunk."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context

from tests.simulation.server import disk
from tests.simulation.server.faults import KINDS
from tests.simulation.server.shrink import Failure, failed_seeds, failure_of, report

CHUNK = 20


def main() -> int:
    """Exit status 1 when a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.server", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many schedules")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument(
        "--without", action="append", default=[], choices=[*KINDS, "many kills", *disk.KINDS], help="leave out a fault"
    )
    parser.add_argument("--requests", type=int, help="with --seed: only so many requests")
    args = parser.parse_args()
    if args.seed is not None:
        return _run_one(failure_of(args.seed, frozenset(args.without), args.requests))
    failed: list[int] = []
    done, started = 0, time.monotonic()
    for seeds in _run_all(args.start, args.seeds, args.jobs):
        failed += seeds
        done = min(args.seeds, done + CHUNK)
        _show_progress(done, args.seeds, len(failed), time.monotonic() - started)
        if failed and not args.keep_going:
            break
    print(file=sys.stderr)
    for seed in sorted(failed)[:3]:
        found = failure_of(seed)
        print(report(found) if found is not None else f"seed {seed} fails in company only: it is not deterministic")
    print(f"{done} schedules, {len(failed)} failed{': seeds ' + str(sorted(failed)[:20]) if failed else ''}")
    return 1 if failed else 0


def _run_one(failure: Failure | None) -> int:
    if failure is None:
        print("it passes")
        return 0
    print(f"{type(failure.error).__name__}: {failure.error}\nagain: {failure.command}")
    return 1


def _run_all(start: int, count: int, jobs: int) -> Iterator[list[int]]:
    """Yield the failed seeds of each chunk, in no particular order of chunks."""
    chunks = [range(first, min(first + CHUNK, start + count)) for first in range(start, start + count, CHUNK)]
    if jobs == 1:
        yield from map(failed_seeds, chunks)
        return
    with get_context("spawn").Pool(jobs, maxtasksperchild=50) as pool:
        yield from pool.imap_unordered(failed_seeds, chunks)


def _show_progress(done: int, total: int, failed: int, elapsed_s: float) -> None:
    eta_s = elapsed_s / done * (total - done)
    line = f"\r{done}/{total} schedules, {failed} failed, {done / elapsed_s:.1f}/s, {eta_s:.0f} s left   "
    print(line, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
