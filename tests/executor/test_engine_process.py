"""The engine process as its supervisor sees it: lines on the standard output, a status at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backend.api.processes.arguments import arguments_of
from backend.executor import engine_process
from backend.executor.engine_process import EngineArguments
from backend.executor.kept_files import KeptFiles


def test_what_keeps_it_from_starting_is_told_in_one_line_and_by_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        engine_process, "_die_with_parent", lambda *arguments: None
    )  # pytest's standard input is not a supervisor's
    monkeypatch.setattr(engine_process.signal, "signal", lambda *arguments: None)
    config = tmp_path / "config.json"
    config.write_text('{"scheduler": {"max_batch": 3}}')
    monkeypatch.setattr(sys, "argv", ["engine", "--config", str(config), "--socket", str(tmp_path / "s")])
    assert engine_process.main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "max_batch" in json.loads(line)["error"]


def test_it_ends_when_its_standard_input_does() -> None:
    program = "from backend.executor import engine_process; engine_process._die_with_parent(None); print('still here')"
    done = subprocess.run([sys.executable, "-c", program], input="x", capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_parent_that_is_killed_leaves_no_directory_that_was_made_for_the_engine(tmp_path: Path) -> None:
    own, given = tmp_path / "own", tmp_path / "given"
    program = "import sys; from backend.executor import engine_process; engine_process.main()"
    for directory, flags in ((own, ["--owns-directory"]), (given, [])):
        directory.mkdir()
        arguments = [sys.executable, "-c", program, "--socket", str(directory / "s"), *flags]
        subprocess.run(arguments, input="", capture_output=True, text=True, timeout=60, check=False)
    assert (own.exists(), given.exists()) == (False, True)


def test_what_the_supervisor_writes_on_the_command_line_is_what_the_process_reads() -> None:
    for kept in (KeptFiles(), KeptFiles((7, 8), 9, 10), KeptFiles((), None, 3)):
        words = ["python", "-m", "module", "--socket", "/a b/s", "--config", "c.json", *kept.arguments, "--spare"]
        given = arguments_of(EngineArguments, words)
        assert (given.socket, given.config, given.spare, given.owns_directory) == ("/a b/s", "c.json", True, False)
        assert KeptFiles.of(given) == kept


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "missing required field `socket`"),
        (["--socket", "s", "--kv-pol", "3"], "unknown field `kv_pol`"),
        (["--socket", "s", "--kv-pool", "x"], "kv_pool"),
        (["--socket", "s", "t"], "socket"),
        (["--socket", "s", "--config"], "config"),
    ],
)
def test_a_wrong_argument_of_a_process_is_named_in_one_sentence(words: list[str], named: str) -> None:
    with pytest.raises(SystemExit, match=f"^wrong arguments: .*{named}[^\n]*$"):
        arguments_of(EngineArguments, words)
