"""`everbatch serve` as it is typed, with the OpenAI endpoint beside Triton's ports."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from deploy import ROOT
from deploy.ports import Ports
from deploy.processes import Process, processes_of_run
from tests.e2e.conftest import EXACT
from tests.e2e.wire import eventually

KEY = "alice-key-0123456789"
ASK = {"model": "everbatch", "prompt": "def main(", "max_tokens": 4, "temperature": 0}


class Launched:
    """The launcher's process, what it has said until it was ready, and the port of the endpoint."""

    def __init__(self, process: subprocess.Popen[str], said: str, port: int) -> None:
        self.process, self.said = process, said
        self.url = f"http://127.0.0.1:{port}/v1"

    def children(self) -> list[Process]:
        """All processes of its server, the endpoint included: they carry one run id."""
        prefix = f"EVERBATCH_RUN_PREFIX={run_prefix()}".encode()
        found = [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if prefix in read(path)]
        ids = {part.partition(b"=")[2].decode() for pid in found for part in read(Path(f"/proc/{pid}/environ")).split(b"\0")
               if part.startswith(b"EVERBATCH_RUN_ID=")}  # fmt: skip
        return [process for run_id in ids for process in processes_of_run(run_id)]

    def endpoint(self) -> int | None:
        """The process id of the endpoint."""
        named = [child.pid for child in self.children() if b"gateway" in read(Path(f"/proc/{child.pid}/cmdline"))]
        return named[0] if len(named) == 1 else None

    def ask(self, key: str = KEY) -> str:
        with openai.OpenAI(base_url=self.url, api_key=key, max_retries=0) as client:
            return client.completions.create(**ASK).choices[0].text


def run_prefix() -> str:
    return f"serve-command-{os.getpid()}-"


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # It has ended meanwhile, or is another user's.
        return b""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    ports, port = Ports.free(), Ports.free().http
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.touch(0o600)
    keys.write_text(f"alice {KEY}\n")
    root = Path(tempfile.mkdtemp(prefix="eb-"))
    command = [sys.executable, "-P", "-m", "deploy.cli", "serve", *(f"--set={setting}" for setting in EXACT)]
    command += [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}"]
    command += [f"--openai-port={port}", f"--api-keys={keys}", "--exit-timeout=5", "--", "--log-verbose=0"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "EVERBATCH_RUN_ROOT": str(root)}
    variables["EVERBATCH_RUN_PREFIX"] = run_prefix()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if "Ctrl-C stops it" in line:
                break
        assert process.poll() is None, said
        yield Launched(process, said, port)
    finally:
        process.kill()  # The janitor ends what it leaves, if a test has not stopped it.
        process.wait()
        shutil.rmtree(root)


def test_the_endpoint_is_on_the_banner_and_answers_those_with_a_key(launched: Launched) -> None:
    assert f"OpenAI   {launched.url}" in launched.said
    assert f"page     {launched.url.removesuffix('/v1')}\n" in launched.said
    assert launched.ask()
    with pytest.raises(openai.AuthenticationError):
        launched.ask("a-key-of-nobody-0123")


def test_an_endpoint_that_is_killed_comes_back(launched: Launched) -> None:
    before = launched.ask()
    first = launched.endpoint()
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: launched.endpoint() not in (None, first), 60)

    def answers() -> bool:
        try:
            return launched.ask() == before
        except openai.APIError:  # It does not listen yet.
            return False

    assert eventually(answers, 60)


def test_sigterm_ends_the_endpoint_with_the_server(launched: Launched) -> None:
    assert launched.children()
    launched.process.send_signal(signal.SIGTERM)
    said, _ = launched.process.communicate(timeout=60)
    assert launched.process.returncode == 0 and "stopped; no process of it is left" in said
    assert "the OpenAI endpoint was ended by signal 9 (SIGKILL); starting it again" in said
    assert not launched.children()
