"""Help before there is an environment: what is stored is what the command line says, and nothing is installed for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import ROOT, environment
from tools import write_help


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One without an environment."""
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "begins"),
    [
        ([], 2, "Usage: everbatch [OPTIONS] COMMAND"),
        (["--help"], 0, "Usage: everbatch [OPTIONS] COMMAND"),
        (["serve", "--help"], 0, "Usage: everbatch serve"),
        (["bench", "--help"], 0, "Usage: everbatch bench"),
        (["--version"], 0, "everbatch 0"),
    ],
)
def test_help_and_version_need_no_environment(
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    begins: str,
) -> None:
    monkeypatch.setattr(environment, "make", lambda *_: pytest.fail("an environment was made"))
    with pytest.raises(SystemExit) as ended:
        environment._own_python(checkout, arguments)
    assert ended.value.code == status and not (checkout / ".venv").exists()
    assert capsys.readouterr().out.strip().startswith(begins)


def test_help_into_a_pipe_whose_reader_has_left_is_no_traceback(checkout: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from deploy.environment import main; "
    program += f"main({str(checkout)!r}, ['serve', '--help'])"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as stdout:
        variables = {key: value for key, value in os.environ.items() if key != "EVERBATCH_PYTHON"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=variables, check=False)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(
    "arguments", [["bench", "peers", "--help"], ["serve", "--", "--help"], ["nocommand", "--help"], ["serve"]]
)
def test_what_asks_for_more_than_help_is_no_help(arguments: list[str]) -> None:
    assert environment.asked_help(arguments) is None


def test_the_stored_help_is_up_to_date() -> None:
    stored = {path.stem: path.read_text() for path in environment.HELP_DIRECTORY.glob("*.txt")}
    assert write_help.texts() == stored, "run python -m tools.write_help"
