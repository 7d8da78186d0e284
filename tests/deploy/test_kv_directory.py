"""What doctor says of a directory for the second level of KV."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.api.config.schema import KvCacheConfig
from deploy import kv_directory
from deploy.doctor import examine
from deploy.kv_directory import look_at
from deploy.ports import Ports


def test_a_directory_of_ones_own_is_fine_also_before_it_is_there(tmp_path: Path) -> None:
    assert look_at(str(tmp_path))[0] in ("ok", "warn") and look_at(str(tmp_path / "a" / "b"))[0] in ("ok", "warn")
    assert not (tmp_path / "a").exists()


def test_what_others_may_write_a_link_and_a_file_are_not(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path)
    states = {name: look_at(str(tmp_path / name)) for name in ("open", "file", "link")}
    assert {name: seen[0] for name, seen in states.items()} == dict.fromkeys(states, "fail")
    assert states["open"][2] == "chmod 700" and "a link to one is not followed" in states["link"][2]


def test_too_little_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_directory, "KvCacheConfig", lambda: KvCacheConfig(directory_bytes=1 << 60))
    state, seen, remedy = look_at(str(tmp_path))
    assert state == "warn" and "GiB free in" in seen and "directory_bytes" in remedy
    monkeypatch.setattr(kv_directory, "KvCacheConfig", lambda: KvCacheConfig(directory_bytes=1))
    assert look_at(str(tmp_path))[0] == "ok"


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_directory.os, "geteuid", lambda: 12345)
    assert "belongs to user" in look_at(str(tmp_path))[1]


@pytest.mark.parametrize("user", [0, 12345])
def test_a_directory_that_is_not_there_yet_may_be_made_where_others_write_too(
    user: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below /tmp."""
    monkeypatch.setattr(kv_directory.os, "geteuid", lambda: user)
    tmp_path.chmod(0o1777)
    assert look_at(str(tmp_path / "a" / "b"))[0] in ("ok", "warn")


def test_doctor_looks_at_it_when_it_is_told_of_it(tmp_path: Path) -> None:
    found = examine("127.0.0.1", Ports(1, 2, 3), kv_directory=str(tmp_path))
    assert [each.state for each in found if each.name == "second level of KV"] in (["ok"], ["warn"])
