"""`everbatch serve` as it is typed, in a process of its own, and the processes that it starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy import ROOT
from deploy.ports import Ports
from deploy.processes import Process, processes_of_run
from tests.e2e.conftest import EXACT

# Words in the command lines of what may be killed.
WORDS = {"server": (b"bin/tritonserver",), "stub": (b"/everbatch/1/model.py", b"/tensorrt_llm/1/model.py")}


class Launched:
    """The launcher's process, what it has said until it was ready, the ports of Triton and the endpoint, and where runs lie."""

    def __init__(
        self, process: subprocess.Popen[str], said: str, ports: Ports, port: int, prefix: str, root: Path
    ) -> None:
        self.process, self.said, self._prefix, self.root = process, said, prefix, root
        self.ports, self.openai_port = ports, port
        self.grpc_url, self.url = f"127.0.0.1:{ports.grpc}", f"http://127.0.0.1:{port}/v1"

    def children(self) -> list[Process]:
        """All processes of its server, the endpoint included: they carry one run id."""
        prefix = f"EVERBATCH_RUN_PREFIX={self._prefix}".encode()
        found = [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if prefix in read(path)]
        ids = {part.partition(b"=")[2].decode() for pid in found for part in read(Path(f"/proc/{pid}/environ")).split(b"\0")
               if part.startswith(b"EVERBATCH_RUN_ID=")}  # fmt: skip
        return [process for run_id in ids for process in processes_of_run(run_id)]

    def pid_of(self, word: bytes) -> int | None:
        """The process with this word in its command line, if there is exactly one."""
        named = [child.pid for child in self.children() if word in read(Path(f"/proc/{child.pid}/cmdline"))]
        return named[0] if len(named) == 1 else None


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # It has ended meanwhile, or is another user's.
        return b""


@contextmanager
def launched(*flags: str) -> Iterator[Launched]:
    """A server on free ports that computes exactly, from when it is ready until the end of the block."""
    ports, port = Ports.free(), Ports.free().http
    root = Path(tempfile.mkdtemp(prefix="eb-"))
    prefix = f"launched-{os.getpid()}-{ports.http}-"
    command = [sys.executable, "-P", "-m", "deploy.cli", "serve", *(f"--set={setting}" for setting in EXACT)]
    command += [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}"]
    command += [f"--openai-port={port}", "--exit-timeout=5", *flags, "--", "--log-verbose=0"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "EVERBATCH_RUN_ROOT": str(root), "EVERBATCH_RUN_PREFIX": prefix}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            print(line, end="", flush=True)
            if "Ctrl-C stops it" in line:
                break
        assert process.poll() is None, said
        yield Launched(process, said, ports, port, prefix, root)
    finally:
        process.kill()  # The janitor ends what it leaves, if a test has not stopped it.
        process.wait()
        shutil.rmtree(root)
