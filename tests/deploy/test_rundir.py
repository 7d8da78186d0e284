"""The private run directory: configuration, socket path, rendered repository."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from backend.api.config import EngineConfig, load_config
from deploy import rundir
from deploy.errors import UserError

PBTXT = 'backend: "python"\nmodel_transaction_policy {\n  decoupled: True\n}\ninput [ { name: "decoupled_hint" } ]\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    source = tmp_path / "repository"
    for name, text in (("streams", PBTXT), ("plain", 'backend: "python"\n')):
        (source / name / "1").mkdir(parents=True)
        (source / name / "config.pbtxt").write_text(text)
        (source / name / "1" / "model.py").write_text("# model\n")
    (source / "README").write_text("no model\n")
    return source


def test_the_bytecode_of_the_models_is_there_before_a_stub_writes_it(tmp_path: Path) -> None:
    """Triton takes a directory that has changed for a changed model, and unloads it at the next load of any."""
    model = tmp_path / "some" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text("VALUE = 1\n")
    rundir.compile_models(tmp_path)
    before = model.parent.stat().st_mtime_ns
    subprocess.run(
        [sys.executable, "-c", "import model"], cwd=model.parent, check=True, env={"PYTHONPATH": str(model.parent)}
    )
    assert model.parent.stat().st_mtime_ns == before and list(model.parent.glob("__pycache__/*.pyc"))


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


def test_a_decoupled_repository_is_served_as_it_is(repository: Path, tmp_path: Path) -> None:
    assert rundir.render_repository(repository, tmp_path / "copy", decoupled=True) == repository
    assert not (tmp_path / "copy").exists()


def test_unary_mode_rewrites_every_policy_in_a_copy_and_links_the_rest(repository: Path, tmp_path: Path) -> None:
    copy = rundir.render_repository(repository, tmp_path / "copy", decoupled=False)
    assert sorted(path.name for path in copy.iterdir()) == ["plain", "streams"]
    text = (copy / "streams" / "config.pbtxt").read_text()
    assert "decoupled: false" in text and "True" not in text and "decoupled_hint" in text
    assert (copy / "plain" / "config.pbtxt").read_text() == 'backend: "python"\n'
    assert (copy / "streams" / "1" / "model.py").resolve() == repository / "streams" / "1" / "model.py"
    assert "decoupled: True" in (repository / "streams" / "config.pbtxt").read_text()  # the source is untouched


def test_rendering_again_replaces_the_former_copy(repository: Path, tmp_path: Path) -> None:
    rundir.render_repository(repository, tmp_path / "copy", decoupled=False)
    (repository / "plain" / "config.pbtxt").unlink()
    copy = rundir.render_repository(repository, tmp_path / "copy", decoupled=False)
    assert [path.name for path in copy.iterdir()] == ["streams"]


def test_a_repository_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model"):
        rundir.check_repository(tmp_path)
    with pytest.raises(UserError, match="is no directory"):
        rundir.check_repository(tmp_path / "missing")


def test_every_model_of_this_project_can_be_made_unary() -> None:
    found = sorted((rundir.ROOT / "model_repository").glob("*/config.pbtxt"))
    assert found
    for path in found:
        text = path.read_text()
        if "model_transaction_policy" in text:
            assert "decoupled: false" in rundir.set_decoupled(text, False)
