"""A place for kept weights, and a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.worker import packed_model
from kernels.cpu.build import NativeLibrary
from tools.make_random_model import make_random_model


@pytest.fixture(autouse=True)
def every_model_is_kept(best_kernels: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_model, "MIN_BYTES", 0)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(0o700)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_random_model(tmp_path / "model", vocab_size=300)
