"""`pytest -p tests.mutants.plugin --mutant FILE:NAME`: the tests run with that bug planted, before they are imported."""

from __future__ import annotations

import pytest

from tests.mutants import operators
from tests.mutants.catalogue import find
from tests.mutants.generated import PREFIX, split


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutant", default="", metavar="ROOM:NAME", help="plant this bug; see tests/mutants")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--mutant")
    if name.startswith(PREFIX):
        operators.plant(*split(name))
    elif name:
        find(name).plant(setattr)
