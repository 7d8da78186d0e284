"""What all tests share: the `feature` mark, and one torch thread, so that sessions do not fight for cores."""

from __future__ import annotations

import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "feature(*ids): the test closes these rows of the feature list")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Test modules have been imported by now: whoever uses torch has loaded it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
