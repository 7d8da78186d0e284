"""A share of the bugs planted outside of the core is noticed by the tests that are named for it.

The suite shows that these pass without it, for they are part of it. Each takes a run of pytest, so only every hundred and
twentieth is tried here. `python -m tests.mutants` tries all.
"""

from __future__ import annotations

import pytest

from tests.mutants.catalogue import TESTS_FAILED, find, mutants, run_tests

NAMES = [mutant.name for mutant in mutants()]
SAMPLE = NAMES[::120]


def test_there_are_enough_of_them() -> None:
    assert len(NAMES) >= 60


def test_each_of_them_can_be_planted() -> None:
    """The code that it changes is there; otherwise the bug has to follow the code."""
    stale = {}
    for mutant in mutants():
        try:
            mutant.plant(lambda owner, name, value: None)
        except AssertionError as error:
            stale[mutant.name] = str(error)
    assert not stale


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_is_noticed(name: str) -> None:
    status, output = run_tests(find(name).tests, name)
    assert status == TESTS_FAILED, f"{name} with pytest status {status}:\n{output[-2000:]}"
