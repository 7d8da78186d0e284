"""A start that dies of what does not come twice is tried again: the launcher's loop around a stand-in for tritonserver."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from backend.api.config.schema import EngineConfig
from deploy import invocation, supervisor
from deploy.errors import ServerFailed
from deploy.invocation import Installation
from deploy.report import ConsoleReporter
from deploy.supervisor import StopSignals, supervise
from deploy.triton_server import TritonServer

# Counts its starts in a file. The first ones die as a stub's first message once did, the others say that they are ready.
SCRIPT = """#!{python}
import sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
starts = Path({starts!r})
starts.write_text(starts.read_text() + "x")
if len(starts.read_text()) <= {deaths}:
    sys.exit("terminate called after throwing an instance of 'boost::interprocess::lock_exception'")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = next(word.partition("=")[2] for word in sys.argv if word.startswith("--http-port"))
HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


class Signals(StopSignals):
    """A signal comes as soon as the server is ready."""

    def __init__(self) -> None:
        self.count = 0
        self.ready = threading.Event()

    def stop_asked(self) -> bool:
        return self.ready.is_set()

    def wait(self, seconds: float) -> None: ...


def run(deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Serve until ready, or raise; returns what the console said, and the number of starts."""
    starts, script = tmp_path / "starts", tmp_path / "tritonserver"
    starts.write_text("")
    script.write_text(SCRIPT.format(python=sys.executable, starts=str(starts), deaths=deaths))
    script.chmod(0o755)
    monkeypatch.setattr(invocation, "find_installation", lambda: Installation(script))
    server = TritonServer(EngineConfig(), run_dir=tmp_path / "run", probe_model=None, exit_timeout_s=1)
    output, signals = io.StringIO(), Signals()
    reporter = ConsoleReporter(Console(file=output, width=200), server)
    monkeypatch.setattr(reporter, "ready", signals.ready.set)
    try:
        supervise(server, reporter, signals, 60)
    finally:
        output.write(f"starts: {starts.read_text()}\n")
    return output.getvalue(), len(starts.read_text())


def test_two_deaths_of_a_lock_are_told_and_the_third_start_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, starts = run(supervisor.MAX_FIRST_STARTS - 1, tmp_path, monkeypatch)
    assert starts == 3
    assert said.count("while it started") == 2 and said.count("starting the server again in") == 2


def test_a_lock_that_kills_every_start_ends_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerFailed, match="ended with exit status 1 while it started") as error:
        run(99, tmp_path, monkeypatch)
    assert "lock_exception" in error.value.log_tail
    assert len((tmp_path / "starts").read_text()) == supervisor.MAX_FIRST_STARTS
