"""Small tokenizers of six families as fixtures: written to directories as a model would carry them, and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.text.tokenizer import Tokenizer
from tests.text.tokenizers_made import FAMILIES, write_directory


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write_directory(root / name, *make()) for name, make in FAMILIES.items()}


@pytest.fixture(scope="session")
def family_tokenizers(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_directory(path) for name, path in directories.items()}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def directory(family: str, directories: dict[str, Path]) -> Path:
    return directories[family]


@pytest.fixture
def tokenizer(family: str, family_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return family_tokenizers[family]
