"""The private run directory: configuration, socket path."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from backend.api.config import EngineConfig, load_config
from deploy import rundir
from deploy.errors import UserError


def test_the_stored_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(None, ["kv_cache.max_tokens=4096", "triton.decoupled=false", "model.dtype=float32"])
    assert load_config(rundir.write_config(tmp_path, config)) == config


def test_the_stored_configuration_holds_every_section(tmp_path: Path) -> None:
    assert load_config(rundir.write_config(tmp_path, EngineConfig())) == EngineConfig()
    assert '"decoupled": true' in (tmp_path / "config.json").read_text()


def test_the_run_directory_and_its_files_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o755)
    rundir.prepare_run_directory(directory)
    secret = rundir.write_private(directory / "admin.key", "secret")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_run_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="EVERBATCH_RUN_ROOT"):
        rundir.prepare_run_directory(tmp_path / "file" / "run")


def test_a_short_run_directory_holds_the_socket_itself_and_loses_a_stale_one(tmp_path: Path) -> None:
    directory = Path("/tmp") / tmp_path.name
    directory.mkdir(exist_ok=True)
    try:
        (directory / "engine.sock").write_text("stale")
        (directory / "owner.pid").write_text("1")
        assert rundir.socket_directory(directory) == (directory, False)
        assert not list(directory.iterdir())
    finally:
        directory.rmdir()


def test_a_long_run_directory_gets_a_short_socket_directory(tmp_path: Path) -> None:
    sockets, temporary = rundir.socket_directory(tmp_path / ("x" * 100))
    try:
        assert temporary
        assert len(str(sockets / "engine.sock")) <= rundir.MAX_SOCKET_PATH
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    finally:
        sockets.rmdir()


def test_a_path_is_measured_in_bytes_and_not_in_letters(tmp_path: Path) -> None:
    """60 letters of two bytes each: short enough to count, too long for a socket."""
    directory = Path("/tmp", "ä" * 60)
    assert len(str(directory / "engine.sock")) < rundir.MAX_SOCKET_PATH < len(bytes(directory / "engine.sock"))
    sockets, temporary = rundir.socket_directory(directory)
    try:
        assert temporary and sockets != directory
        assert len(bytes(sockets / "engine.sock")) <= rundir.MAX_SOCKET_PATH
    finally:
        if temporary:
            sockets.rmdir()
