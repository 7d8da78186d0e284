"""A tiny checkpoint, and Executors over it that run on torch operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from compat import trtllm
from tests.trtllm.helpers import make_config, make_executor
from tools.make_random_model import make_random_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("trtllm"), seed=1, family="llama", vocab_size=96)


@pytest.fixture(scope="module")
def executor(model_path: Path) -> Iterator[trtllm.Executor]:
    """One for all tests of a file that leave nothing behind."""
    with make_executor(model_path, make_config()) as made:
        yield made
