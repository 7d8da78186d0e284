"""What all tests share: marks, `--quick`, the slowest files, one torch thread, so that sessions do not fight for cores."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from deploy.default_model import VARIABLE
from deploy.model_source import DEFAULT_MODEL
from tests.compiled_once import share_native_kernels
from tests.quick import Quick, Slowest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what is slow (tests/quick.py)")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in its background with Ctrl-C ignored, and so would the programs that the tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "feature(*ids): the test closes these rows of the feature list")
    config.addinivalue_line("markers", "slow(reason): left out by --quick")
    config.addinivalue_line("markers", "real: the test needs published weights (tests/real/weights.py)")
    config.pluginmanager.register(Quick(config.getoption("--quick")))
    config.pluginmanager.register(Slowest())
    share_native_kernels()
    os.environ.setdefault(
        VARIABLE, str(DEFAULT_MODEL)
    )  # Servers of tests need no package index, and the small model is fast.


def pytest_collection_finish(session: pytest.Session) -> None:
    """Test modules have been imported by now: whoever uses torch has loaded it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
