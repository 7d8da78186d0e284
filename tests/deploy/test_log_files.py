"""Logs of former starts are kept, and no log grows without bound."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from deploy import log_files


def test_a_start_keeps_what_the_last_ten_have_written(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "server.log"
    for number in range(13):
        with log_files.begin(path) as file:
            file.write(f"start {number}\n".encode())
    assert path.read_text() == "start 12\n"
    assert [(tmp_path / "logs" / f"server.log.{n}").read_text() for n in range(1, 10)] == [
        f"start {number}\n" for number in range(11, 2, -1)
    ]
    assert len(list((tmp_path / "logs").iterdir())) == 10
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_log_that_is_too_long_is_put_aside_while_the_server_goes_on_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "limit_bytes", lambda path: 100)
    path = tmp_path / "server.log"
    with log_files.begin(path) as file:
        os.write(file.fileno(), b"a" * 100)
        log_files.cut_if_long(path)
        assert path.stat().st_size == 100  # not longer than the limit
        os.write(file.fileno(), b"b")
        log_files.cut_if_long(path)
        os.write(file.fileno(), b"after")
    assert path.read_bytes() == b"after"  # at its beginning: nothing is skipped
    assert (tmp_path / "server.log.1").read_bytes() == b"a" * 100 + b"b"


def test_all_logs_together_take_less_than_a_third_of_a_small_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([64 << 20, 1 << 40])
    monkeypatch.setattr("deploy.log_files.shutil.disk_usage", lambda path: type("usage", (), {"total": next(sizes)}))
    assert (log_files.KEPT + 1) * log_files.limit_bytes(tmp_path / "server.log") <= (64 << 20) * 0.35
    assert log_files.limit_bytes(tmp_path / "server.log") == log_files.MAX_BYTES
