"""Two models under load while one is replaced again and again:  python -m tests.soak.replacements [--requests 10000]

Prints how many requests were answered and which failed; the exit status is 1 if any did.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.several import Load, two_models


def main(arguments: list[str]) -> int:
    flags = argparse.ArgumentParser(prog="python -m tests.soak.replacements", description=__doc__)
    flags.add_argument("--requests", type=int, default=10_000, help="at least so many, of both models together")
    wanted = flags.parse_args(arguments).requests
    began, replacements = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as directory, two_models(Path(directory)) as running:
        before = len(running.server.processes())
        with Load(running) as load:
            while load.answers.total() + len(load.failures) < wanted:
                status = running.operate("replace", "two")
                replacements += 1
                print(f"{load.answers.total()} requests, replacement {replacements} answered {status}", flush=True)
        left = len(running.server.processes()) - before
    took = time.monotonic() - began
    print(f"{load.answers.total()} requests {dict(load.answers)}, {len(load.failures)} failed")
    print(f"{replacements} replacements in {took:.0f} s")
    print(f"{left} processes more than at the start")
    print("\n".join(load.failures[:10]))
    return 1 if load.failures or left > 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
