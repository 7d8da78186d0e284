"""The tests' cache of native kernels: outside of the checkout, unless the user says otherwise or has no place for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.compiled_once import VARIABLE, share_native_kernels


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    return tmp_path / "home"


def test_all_checkouts_of_a_user_have_one_cache(home: Path) -> None:
    share_native_kernels()
    directory = Path(os.environ[VARIABLE])
    assert directory.parent == home and directory.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_the_user_names_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/named/by/the/user")
    share_native_kernels()
    assert os.environ[VARIABLE] == "/named/by/the/user"


def test_a_directory_that_others_may_write_is_not_used(home: Path) -> None:
    (home / "everbatch-tests").mkdir(parents=True)
    (home / "everbatch-tests").chmod(0o777)
    share_native_kernels()
    assert VARIABLE not in os.environ


def test_a_home_that_cannot_be_written_is_not_used(home: Path) -> None:
    home.write_text("a file")
    share_native_kernels()
    assert VARIABLE not in os.environ
