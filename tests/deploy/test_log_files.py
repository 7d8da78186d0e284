"""Logs of former starts are kept, and no log grows without bound."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
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
        assert log_files.look_after(path) is None
        assert path.stat().st_size == 100  # not longer than the limit
        os.write(file.fileno(), b"b")
        assert log_files.look_after(path) is None
        os.write(file.fileno(), b"after")
    assert path.read_bytes() == b"after"  # at its beginning: nothing is skipped
    assert (tmp_path / "server.log.1").read_bytes() == b"a" * 100 + b"b"


def test_all_logs_together_take_about_a_third_of_a_small_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([64 << 20, 1 << 40])
    monkeypatch.setattr("deploy.log_files.shutil.disk_usage", lambda path: type("usage", (), {"total": next(sizes)}))
    two_logs = 2 * (log_files.KEPT + 1)  # of the server and of the endpoint, each with a copy that is being made
    assert two_logs * log_files.limit_bytes(tmp_path / "server.log") <= (64 << 20) * 0.35
    assert log_files.limit_bytes(tmp_path / "server.log") == log_files.MAX_BYTES


def test_a_log_that_cannot_be_copied_aside_is_dropped_so_that_newer_lines_find_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log_files, "limit_bytes", lambda path: 100)
    monkeypatch.setattr("deploy.log_files.shutil.copyfile", no_room)
    path = tmp_path / "server.log"
    path.write_bytes(b"a" * 101)
    assert log_files.look_after(path) is None
    assert path.read_bytes() == b"" and not (tmp_path / "server.log.1").exists()


def test_what_keeps_a_log_from_being_written_is_a_sentence_and_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.log"
    path.write_text("some lines")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("deploy.log_files.shutil.disk_usage", lambda path: usage._replace(free=1000))
    trouble = log_files.look_after(path)
    assert trouble is not None and trouble.startswith("no space is left for the log") and "goes on" in trouble

    def broken(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("deploy.log_files.shutil.disk_usage", broken)
    trouble = log_files.look_after(path)
    assert trouble is not None and "(Read-only file system)" in trouble


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a file system of its own")
def test_logs_on_a_full_file_system_leave_room_again_and_take_their_share_alone(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        path = tmp_path / "server.log"
        with log_files.begin(path) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"a line of a stranger\n" * 100)
            assert shutil.disk_usage(tmp_path).free < log_files.MIN_FREE_BYTES
            log_files.append(path, "is lost")
            assert log_files.look_after(path) is None
            for _ in range(40 * log_files.KEPT):
                file.write(b"x" * (1 << 10))
                assert log_files.look_after(path) is None
        assert shutil.disk_usage(tmp_path).used < (1 << 20) // 2
        assert path.with_name("server.log.9").exists()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
