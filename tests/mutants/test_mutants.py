"""A share of the bugs planted outside of the core is noticed by the tests that are named for it, and these pass without it.

Each takes a pytest process of its own, so only every fortieth is tried here. `python -m tests.mutants` tries all.
"""

from __future__ import annotations

import pytest

from tests.mutants.catalogue import INTERPRETED, TESTS_FAILED, find, mutants, run_tests

NAMES = [mutant.name for mutant in mutants()]
SAMPLE = NAMES[::40]


def test_there_are_enough_of_them() -> None:
    assert len(NAMES) >= 60


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_is_noticed(name: str) -> None:
    status, output = run_tests(find(name).tests, name)
    assert status == TESTS_FAILED, f"{name} with pytest status {status}:\n{output[-2000:]}"


def test_without_a_planted_bug_the_same_tests_pass() -> None:
    named = {test for name in SAMPLE for test in find(name).tests}
    interpreted = {test for test in named if test.startswith(INTERPRETED)}
    for tests in filter(None, (interpreted, named - interpreted)):
        status, output = run_tests(sorted(tests))
        assert status == 0, output[-2000:]
