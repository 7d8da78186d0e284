"""`python -m tests.simulation --seeds 100000 [--start N] [--jobs 2]`: random schedules; a failure is shown shrunk."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context

from tests.simulation.shrink import failed_seeds, report

CHUNK = 50


def main() -> int:
    """Exit status 1 when a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many schedules")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    args = parser.parse_args()
    failed, done, started = [], 0, time.monotonic()
    for seeds in _run_all(args.start, args.seeds, args.jobs):
        failed += seeds
        done = min(args.seeds, done + CHUNK)
        _show_progress(done, args.seeds, len(failed), time.monotonic() - started)
        if failed and not args.keep_going:
            break
    print(file=sys.stderr)
    for seed in failed[:3]:
        print(report(seed))
    print(f"{done} schedules, {len(failed)} failed{': seeds ' + str(failed[:20]) if failed else ''}")
    return 1 if failed else 0


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
    sys.exit(main())
