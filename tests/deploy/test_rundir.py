"""The private run directory: configuration, socket path."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from backend.api.config.file import load_config
from backend.api.config.schema import EngineConfig
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
        assert rundir.plain_directory(directory) == (directory, False)
        assert not list(directory.iterdir())
    finally:
        directory.rmdir()


def test_a_long_run_directory_gets_a_short_directory_for_the_socket(tmp_path: Path) -> None:
    sockets, temporary = rundir.plain_directory(tmp_path / ("x" * 100))
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
    sockets, temporary = rundir.plain_directory(directory)
    try:
        assert temporary and sockets != directory
        assert len(bytes(sockets / "engine.sock")) <= rundir.MAX_SOCKET_PATH
    finally:
        if temporary:
            sockets.rmdir()


@pytest.mark.parametrize("name", ["my checkout", "grüße", "it's", "a&b", "a(b)", "$HOME", "a;b", "a:b", "*"])
def test_a_path_that_triton_does_not_take_gets_a_directory_whose_path_it_does(tmp_path: Path, name: str) -> None:
    directory = Path("/tmp", name)
    assert not rundir.is_plain(directory)
    place, temporary = rundir.plain_directory(directory)
    try:
        assert temporary and rundir.is_plain(place) and stat.S_IMODE(place.stat().st_mode) == 0o700
    finally:
        place.rmdir()


def test_a_temporary_directory_with_a_blank_in_its_path_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir.tempfile, "gettempdir", lambda: str(tmp_path / "a b"))
    place, _ = rundir.plain_directory(Path("/tmp/my checkout"))
    place.rmdir()
    assert place.parent == Path("/tmp")


def test_code_below_a_path_that_triton_does_not_take_is_found_by_a_link(tmp_path: Path) -> None:
    plain, odd = tmp_path / "plain", tmp_path / "my grüße"
    odd.mkdir()
    for _ in range(2):  # the second start finds the link of the first
        way = rundir.plain_way(odd, tmp_path)
        assert rundir.is_plain(way) and way.resolve() == odd
    assert rundir.plain_way(plain, tmp_path) == plain
