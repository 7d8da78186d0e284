"""Plant each bug, and see whether the tests that are named for it notice: `python -m tests.mutants [ROOM | ROOM:NAME ...]`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tests.mutants.catalogue import TESTS_FAILED, Mutant, find, mutants, rooms, run_tests


def verdict(mutant: Mutant) -> str:
    status, output = run_tests(mutant.tests, mutant.name)
    if status == TESTS_FAILED:
        return "killed"
    return "SURVIVES" if status == 0 else f"CANNOT BE TRIED (pytest's status {status}): {output.strip()[-300:]}"


def planted(chosen: list[str]) -> list[Mutant]:
    """The bugs of the rooms and names chosen, all without any. Exits with a sentence for a name that there is not."""
    if not chosen:
        return mutants()
    found: list[Mutant] = []
    for each in chosen:
        if each.partition(":")[0] not in rooms():
            sys.exit(f"there is no room {each!r}; there are {', '.join(rooms())}")
        try:
            found += [find(each)] if ":" in each else mutants([each])
        except LookupError as error:
            sys.exit(str(error))
    return found


def main(
    chosen: Annotated[
        list[str] | None, typer.Argument(metavar="ROOM|ROOM:NAME", help=f"Of {', '.join(rooms())}; none: all.")
    ] = None,
) -> None:
    """Plant each bug, and see whether the tests that are named for it notice. Exit status 1 when a bug survives."""
    survivors, bugs = 0, planted(chosen or [])
    for number, mutant in enumerate(bugs, 1):
        result = verdict(mutant)
        survivors += result != "killed"
        print(f"{number:3} of {len(bugs)}  {mutant.name:60} {result}", flush=True)
    print(f"{len(bugs) - survivors} of {len(bugs)} killed")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    typer.run(main)
