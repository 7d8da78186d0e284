"""Paths that Triton's stubs cannot be started from, or that they cannot read, do not matter."""

from __future__ import annotations

import shutil
from pathlib import Path

from backend.api import load_config
from deploy.repository import DEFAULT_REPOSITORY
from deploy.triton_server import TritonServer
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.e2e.test_fire_serving import DEFAULT_MODEL


def test_a_server_runs_where_paths_hold_blanks_and_letters_that_are_not_ascii(tmp_path: Path) -> None:
    model, models = tmp_path / "mein Modèll", tmp_path / "my models"
    shutil.copytree(DEFAULT_MODEL, model)
    shutil.copytree(DEFAULT_REPOSITORY / "everbatch", models / "everbatch")
    config = load_config(overrides=[*EXACT, f"model.path={model}"])
    server = TritonServer(config, run_dir=tmp_path / "grüße (1)", model_repository=models, exit_timeout_s=5)
    with server:
        wait_ready(server)  # a token was generated
        place = server._temporary_directory
        assert place is not None and place.is_dir()
        assert (server.run_dir / "server.log").is_file(), "what people look for lies where they look for it"
    assert not place.exists()
