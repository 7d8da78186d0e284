"""Planted bugs around the engine: each is a small mistake of one function that the simulation of the server must notice.

`python -m tests.simulation.server.mutants [NAME ...]` says after how many seeds it does. The bugs are in the files bugs_*.py.
Each replaces attributes through `set_attribute(owner, name, value)`: pytest's monkeypatch.setattr.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable

import pytest

from tests.simulation.server import bugs_executor, bugs_level, bugs_serving, bugs_supervisor, bugs_wire
from tests.simulation.server.shrink import first_failure

SetAttribute = Callable[[object, str, object], None]
MUTANTS: dict[str, Callable[[SetAttribute], None]] = {
    name: value
    for module in (bugs_executor, bugs_wire, bugs_supervisor, bugs_serving, bugs_level)
    for name, value in inspect.getmembers_static(module, inspect.isfunction)
    if value.__module__ == module.__name__ and list(inspect.signature(value).parameters) == ["set_attribute"]
}


def main() -> int:
    """Exit status 1 when a planted bug is not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.server.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="planted bugs; all of them without")
    parser.add_argument("--seeds", type=int, default=300, help="how many schedules it may take")
    args = parser.parse_args()
    survived = []
    for name in args.names or MUTANTS:
        started = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            MUTANTS[name](patch.setattr)
            found = first_failure(range(args.seeds))
        if found is None:
            survived.append(name)
        told = "survives" if found is None else f"seed {found.seed}: {str(found.error).splitlines()[0][:110]}"
        print(f"{name:70} {time.monotonic() - started:5.1f} s  {told}", flush=True)
    print(f"{len(survived)} of {len(args.names or MUTANTS)} survive: {survived}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
