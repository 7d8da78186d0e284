"""`pytest -p tests.mutants.plugin --mutant FILE:NAME`: the tests run with that bug planted, before they are imported."""

from __future__ import annotations

import pytest

from tests.mutants import operators
from tests.mutants.catalogue import find
from tests.mutants.generated import PREFIX, split


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutant", default="", metavar="ROOM:NAME", help="plant this bug; see tests/mutants")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """A generated bug is in the module as it is imported, and a conftest.py may import it."""
    name = early_config.known_args_namespace.mutant
    if name.startswith(PREFIX):
        operators.plant(*split(name))


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--mutant")
    if name and not name.startswith(PREFIX):
        find(name).plant(setattr)
