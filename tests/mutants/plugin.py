"""`pytest -p tests.mutants.plugin --mutant FILE:NAME`: the tests run with that bug planted, before they are imported."""

from __future__ import annotations

import pytest

from tests.mutants.catalogue import find


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutant", metavar="ROOM:NAME", help="plant this bug; see tests/mutants")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--mutant")
    if name:
        find(name).plant(setattr)
