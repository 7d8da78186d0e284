"""Generated planted bugs: their names, the tests that should notice them, and a command that tries some.

    python -m tests.mutants.generated backend/scheduler/queue.py            # all of a file
    python -m tests.mutants.generated backend/scheduler --every 50          # every fiftieth of a room, plain progress
    python -m tests.mutants.generated backend/scheduler/queue.py --list     # what they are

A survivor is a question: does a test lack, or does the change make no difference?
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from tests.mutants.catalogue import TESTS_FAILED, run_tests
from tests.mutants.operators import changes
from tests.mutants.prepared import ROOT

PREFIX = "generated:"  # generated:backend/scheduler/queue.py:17
TIMEOUT_S = 1800.0
TESTS = {
    "api": ("api", "serving", "model"),
    "architectures": ("families", "model", "ranks"),
    "compat": ("llm",),
    "core": ("core", "guided"),
    "cpu": ("native", "kernels"),
    "engine": ("engine", "crashes"),
    "executor": ("executor", "crashes"),
    "kvcache": ("kvcache", "engine", "crashes"),
    "layers": ("model",),
    "models": ("model", "weight_formats", "families"),
    "storage": ("core", "crashes"),
    "worker": ("model", "ranks", "native"),
}  # package: the rooms whose tests look at it, where it is not just the room of its name


def split(name: str) -> tuple[Path, int]:
    """The file of a generated bug, and the number of its change."""
    path, _, number = name.removeprefix(PREFIX).rpartition(":")
    return ROOT / path, int(number)


def suite_of(path: Path) -> list[str]:
    """The tests of a file's package, those of the file itself first."""
    packages = path.relative_to(ROOT).parts[:-1]
    named = (TESTS.get(name, (name,)) for name in reversed(packages))
    rooms = next(found for found in named if (ROOT / "tests" / found[0]).is_dir())
    places = [ROOT / "tests" / room for room in rooms]
    own = [room / f"test_{path.stem}.py" for room in places]
    return [str(each.relative_to(ROOT)) for each in (*own, *places) if each.exists()]


def names(paths: list[Path], every: int) -> dict[str, str]:
    """Name of each bug -> what it changes."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    found = {}
    for file in files:
        place = file.resolve().relative_to(ROOT)
        for number, change in enumerate(changes(ast.parse(file.read_text()))):
            found[f"{PREFIX}{place}:{number}"] = f"{place}:{change.line}  {change.text}"
    return dict(list(found.items())[::every])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.generated", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE or DIRECTORY")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every Nth of them")
    parser.add_argument("--list", action="store_true", help="print them, and try none")
    options = parser.parse_args()
    found = names(options.paths, options.every)
    if options.list:
        print(*found.values(), sep="\n")
        return 0
    survivors = []
    for number, (name, text) in enumerate(found.items(), 1):
        status, _ = run_tests(suite_of(split(name)[0]), name, TIMEOUT_S)
        if status != TESTS_FAILED:
            survivors.append(text)
        print(f"{number:4} of {len(found)}  {'killed' if status == TESTS_FAILED else 'SURVIVES'}  {text}", flush=True)
    print(f"{len(found) - len(survivors)} of {len(found)} killed", *survivors, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
