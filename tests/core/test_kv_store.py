"""The directory through which engines of one machine pass KV."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from backend.api.errors import ConfigError
from backend.storage.kv_store import KvStore

pytestmark = pytest.mark.feature("002-49")


def test_what_is_kept_is_taken_once(tmp_path: Path) -> None:
    store = KvStore(str(tmp_path / "made"), 100, 60.0)
    name = store.put(b"blocks")
    (file,) = (tmp_path / "made").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    other = KvStore(str(tmp_path / "made"), 100, 60.0)
    assert other.take(name, 6) == b"blocks"
    assert store.take(name, 6) is None and not list((tmp_path / "made").iterdir())


def test_the_oldest_goes_when_room_is_needed(tmp_path: Path) -> None:
    store = KvStore(str(tmp_path), 25, 60.0)
    names = []
    for number in range(3):
        names.append(store.put(bytes([number]) * 10))
        os.utime(tmp_path / f"{names[-1]}.kv", (time.time() - 30 + number,) * 2)
    assert [store.take(name, 10) for name in names] == [None, b"\1" * 10, b"\2" * 10]
    assert store.put(bytes(26)) is None


def test_what_nobody_takes_goes_after_a_time_and_so_do_the_files_of_a_killed_engine(tmp_path: Path) -> None:
    now = time.time()
    first = KvStore(str(tmp_path), 100, 60.0, lambda: now)
    name = first.put(b"x")
    KvStore(str(tmp_path), 100, 60.0, lambda: now + 59)
    assert (tmp_path / f"{name}.kv").exists()
    KvStore(str(tmp_path), 100, 60.0, lambda: now + 62)
    assert not (tmp_path / f"{name}.kv").exists()


@pytest.mark.parametrize("name", ["", "../secret", "/etc/passwd", "a" * 31, "A" * 32, "a" * 32 + "\n", "a" * 32])
def test_a_name_that_put_has_not_given_finds_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.kv").write_bytes(b"x")
    assert KvStore(str(tmp_path / "store"), 100, 60.0).take(name, 1) is None
    assert (tmp_path / "secret.kv").exists()


def test_links_pipes_and_files_of_another_size_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    store = KvStore(str(tmp_path / "store"), 100, 60.0)
    (tmp_path / "store" / ("a" * 32 + ".kv")).symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "store" / ("b" * 32 + ".kv"))
    assert store.take("a" * 32, 1) is None and store.take("b" * 32, 1) is None
    assert store.take(store.put(b"xy"), 1) is None
    assert (tmp_path / "secret").read_bytes() == b"x"


def test_a_directory_in_which_others_write_is_refused_and_one_that_cannot_be_made(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="where others may write; name one of this user alone"):
        KvStore(str(tmp_path), 100, 60.0)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="which cannot be used .*; name another one"):
        KvStore(str(tmp_path / "file"), 100, 60.0)
