"""The shell blocks of the pages for users do what they are for, typed as they stand into a shell beside one server.

That server has every profile that shares one, and the models of docs/vllm.md. `./everbatch serve` of a block is not started once
more: tests/docs/test_blocks.py holds its options and settings against the command line. Programs of README.md, docs/openai.md
and docs/anthropic.md run here too. What the default model answers on the pages, tests/real/test_pages.py reads.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy import ROOT
from gateway.keys import read_keys
from tests.docs.blocks import ALL, Block, blocks
from tests.e2e.launched import Launched, launched

# (page, beginning of a block) -> the test that runs it, because it asks for a server of its own.
ELSEWHERE = {
    ("docs/lmdeploy.md", "./everbatch serve --profile turbomind"): "tests/e2e/test_page_examples.py",
    ("docs/moving-from-tensorrt-llm.md", "cp -r model_repository NEW"): "tests/e2e/test_moving_page.py",
    ("docs/triton.md", "TS="): "tests/e2e/test_plain_tritonserver.py",
}
PROGRAM_PAGES = ("README.md", "docs/openai.md", "docs/anthropic.md")  # start.md and others have tests of their own
WRAPPER = """#!/bin/sh
[ "$1" = serve ] && exit 0
exec "{python}" -P -m deploy.cli "$@"
"""
CURL = '#!/bin/sh\nexec "{curl}" --silent --show-error --fail-with-body --max-time 60 "$@"\n'
_ADDRESS = re.compile(r"\b(localhost|127\.0\.0\.1):(8000|8001|8002|9000)\b")
_SPEED = re.compile(r"(?<= )[\d.]+(?= tokens/s| ms\b)")
_ERROR = re.compile(r'(?<!\\)"error": ?[{"]')  # a key of an answer, not a text in it


def elsewhere(block: Block) -> str | None:
    return next(
        (test for (page, begin), test in ELSEWHERE.items() if page == block.page and block.text.startswith(begin)), None
    )


HERE = [block for block in ALL if block.tag in ("sh", "console") and not block.needs and elsewhere(block) is None]
PROGRAMS = [block for block in ALL if block.tag == "python" and block.page in PROGRAM_PAGES]


@dataclass
class Shell:
    """A directory as a user's checkout, whose `./everbatch serve` has been typed already, and the server that it started."""

    directory: Path
    variables: dict[str, str]
    server: Launched | None = None

    def at_this_server(self, text: str) -> str:
        """A text of a page with the server's ports in place of the usual ones."""
        assert self.server is not None
        ports = self.server.ports
        here = {"8000": ports.http, "8001": ports.grpc, "8002": ports.metrics, "9000": self.server.openai_port}
        return _ADDRESS.sub(lambda found: f"{found[1]}:{here[found[2]]}", text)

    def run(self, *command: str, typed: str = "") -> str:
        """What a command prints. AssertionError when it fails."""
        return self._done(*command, typed=typed).stdout

    def told_by(self, command: str, typed: str = "") -> str:
        """What a command says of its work, and then what it prints."""
        done = self._done("bash", "-eo", "pipefail", "-c", command, typed=typed)
        return f"{done.stderr}\n{done.stdout}"

    def _done(self, *command: str, typed: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, cwd=self.directory, env=self.variables, input=typed, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
        return done

    def bash(self, text: str, typed: str = "") -> str:
        return self.run("bash", "-eo", "pipefail", "-c", text, typed=typed)


def checkout(directory: Path) -> Shell:
    """A directory with what a checkout holds, and before all others a `curl` that fails when it is answered with an error."""
    for entry in ROOT.iterdir():
        if entry.name not in ("everbatch", ".venv", ".run", ".git"):
            (directory / entry.name).symlink_to(entry)
    (directory / ".venv").symlink_to(sys.prefix)
    (directory / "bin").mkdir()
    curl = shutil.which("curl")
    assert curl is not None, "install curl: apt-get install curl"
    for path, script in ((directory / "everbatch", WRAPPER), (directory / "bin" / "curl", CURL)):
        path.write_text(script.format(python=sys.executable, curl=curl))
        path.chmod(0o755)
    path = f"{directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return Shell(directory, os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"})


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = checkout(tmp_path_factory.mktemp("checkout"))
    (lines,) = [block.text for block in blocks("docs/vllm.md") if "my_models\n" in block.text]
    shell.bash(lines.partition("./everbatch serve")[0])
    with launched("--profile=trtllm,lmdeploy", f"--model-repository={shell.directory / 'my_models'}") as server:
        shell.server = server
        shell.variables["EVERBATCH_RUN_ROOT"] = str(server.root)
        (shell.directory / ".run").mkdir()
        (shell.directory / ".run" / "serve-8000").symlink_to(server.root / f"serve-{server.ports.http}")
        yield shell


def test_each_block_that_is_run_elsewhere_is_there_and_its_test_reads_the_page() -> None:
    found = [(block, test) for block in ALL if (test := elsewhere(block)) is not None]
    assert len(found) == len(ELSEWHERE)
    assert [str(block) for block, test in found if Path(block.page).name not in (ROOT / test).read_text()] == []


@pytest.mark.parametrize("block", HERE, ids=str)
def test_a_block_does_what_it_is_for(shell: Shell, block: Block) -> None:
    said = "\n".join(line[2:] for line in block.text.splitlines() if line.startswith("> "))
    printed = shell.bash(shell.at_this_server(block.commands), typed=said)
    asks = re.search(r"curl|everbatch (generate|chat|top)", block.commands)
    assert not _ERROR.search(printed) and bool(printed.strip()) == bool(asks)


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_program_prints_an_answer(shell: Shell, block: Block) -> None:
    assert shell.run(sys.executable, "-c", shell.at_this_server(block.text)).strip()


def shapes(text: str) -> set[str]:
    """The lines of a text without the chat's `> `, without speeds, and without those that stand for others."""
    return {_SPEED.sub("N", line.removeprefix("> ")) for line in text.splitlines() if line.strip(" .")}


def test_the_keys_of_the_page_are_taken_by_the_endpoint(shell: Shell) -> None:
    (block,) = [block for block in blocks("docs/openai.md") if "umask" in block.text]
    (shell.directory / "keys").unlink(missing_ok=True)
    shell.bash(block.text)
    taken = read_keys(shell.directory / "keys", served=["everbatch", "doll"])
    assert {client.name for client in taken.values()} == {"alice", "bob", "operator"}


def test_a_block_that_is_refused_fails(shell: Shell) -> None:
    with pytest.raises(AssertionError, match="nobody"):
        shell.bash(shell.at_this_server("curl localhost:8000/v2/models/nobody/generate -d '{}'"))
    with pytest.raises(AssertionError, match="No such option"):
        shell.bash('./everbatch generate "x" --max-token 3')
