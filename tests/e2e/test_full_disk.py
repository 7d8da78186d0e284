"""A server whose run directory lies on a file system without room goes on serving."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.api.processes import liveness
from backend.api.processes.liveness import TICK_S
from deploy import health, log_files
from tests.e2e.conftest import serve
from tests.e2e.starts import wait_ready
from tests.e2e.wire import eventually, post


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 24 MiB, for this test alone."""
    if os.getuid() != 0:
        pytest.skip("only root may mount a file system of its own")
    directory = Path(tempfile.mkdtemp(prefix="eb-"))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(directory)], check=False).returncode:
        directory.rmdir()
        pytest.skip("no file system can be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
        directory.rmdir()


def fill(directory: Path) -> None:
    with (directory / "filler").open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2
    assert shutil.disk_usage(directory).free < log_files.MIN_FREE_BYTES


def test_a_full_disk_is_told_once_and_neither_readiness_nor_serving_end(small_disk: Path) -> None:
    told: list[str] = []
    server = serve(small_disk / "run", "triton.watchdog_timeout_s=5")
    server.on_event = told.append
    with server:
        wait_ready(server)
        assert server.run_dir.stat().st_dev == small_disk.stat().st_dev and server._monitor is not None
        fill(small_disk)
        assert eventually(lambda: told != [], 30)
        for _ in range(int(3 * liveness.SILENT_S / TICK_S)):
            status, _ = post(f"{server.http_url}/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 2})
            assert status == 200 and server.failure() is None
            assert server._monitor._end.wait(TICK_S) is False
        assert health.judge(server._signs.latest if server._signs else []).unready is None
        assert [line for line in told if "no space is left for the log" in line] == told and len(told) == 1
        (small_disk / "filler").unlink()
        assert post(f"{server.http_url}/v2/models/ensemble/generate", {"text_input": "a", "max_tokens": 2})[0] == 200
