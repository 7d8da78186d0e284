"""The tiers, and tiny checkpoints that are made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families.tiny import make
from tests.model.conftest import one_thread  # noqa: F401 (a fixture)
from tests.model.tiers import native_kernels, tier  # noqa: F401 (fixtures)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(name of a family, dtype) -> its directory."""
    made: dict[tuple[str, str], Path] = {}

    def of(name: str, dtype: str = "float32") -> Path:
        if (name, dtype) not in made:
            made[name, dtype] = make(tmp_path_factory.mktemp("tiny"), name, dtype)
        return made[name, dtype]

    return of
