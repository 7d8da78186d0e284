"""`python -m tests.mutants [ROOM ...]`: plant each bug, and see whether the tests notice it."""

from __future__ import annotations

import sys

from tests.mutants.catalogue import TESTS_FAILED, Mutant, mutants, run_tests


def verdict(mutant: Mutant) -> str:
    status, output = run_tests(mutant.tests, mutant.name)
    if status == TESTS_FAILED:
        return "killed"
    return "SURVIVES" if status == 0 else f"CANNOT BE TRIED (pytest's status {status}): {output.strip()[-300:]}"


def main(chosen: list[str]) -> int:
    survivors = 0
    planted = mutants(chosen)
    for number, mutant in enumerate(planted, 1):
        result = verdict(mutant)
        survivors += result != "killed"
        print(f"{number:3} of {len(planted)}  {mutant.name:60} {result}", flush=True)
    print(f"{len(planted) - survivors} of {len(planted)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
