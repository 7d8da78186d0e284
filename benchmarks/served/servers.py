"""Servers as processes: start, wait, stop for a while, end. How each is started is in contestants.py."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.peers import commands
from benchmarks.peers.errors import Skipped

READY_S = 1200.0  # vLLM compiles its model at the start
END_S = 60.0
_POLL_S = 0.25


@dataclass(frozen=True)
class Start:
    """How a server is started. `can_pause`: it bears SIGSTOP while others are measured. `grpc` and `http`: Triton's, if any."""

    name: str
    url: str
    model: str  # what clients call it
    command: Sequence[str] = ()  # empty: it runs already and is left alone
    environment: dict[str, str] = field(default_factory=dict)
    health: str = "/health"
    can_pause: bool = True
    http: str = ""
    grpc: str = ""
    version: str = ""


class Server:
    """One of the servers. `log`: where its process writes."""

    def __init__(self, start: Start, log: Path) -> None:
        self.start = start
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        if start.command:
            with open(log, "wb") as file:
                self._process = commands.start(
                    start.command, start.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                )

    def wait_ready(self, tick: Callable[[], None]) -> None:
        """Until it answers. Raises Skipped."""
        deadline = time.monotonic() + (READY_S if self._process else 10.0)
        while not self._answers():
            if self._has_ended():
                raise Skipped(f"its process ended; its last words: {self._last_words()}")
            if time.monotonic() > deadline:
                raise Skipped(f"it does not answer at {self.start.url}{self.start.health}")
            tick()
            time.sleep(_POLL_S)  # a server does not announce that it listens, so it is polled

    def _answers(self) -> bool:
        """By OpenAI's wire, and by Triton's where it has that."""
        triton = not self.start.http or answers(self.start.http, "/v2/health/ready")
        return triton and answers(self.start.url, self.start.health)

    def pause(self) -> None:
        """Stop its processes, if they bear it, so that no spinning thread takes a core from another server."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run again."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, and all processes of its group."""
        if self._process is None or self._process.returncode is not None:
            return
        self.resume()
        os.kill(self._process.pid, signal.SIGTERM)  # not by Popen, which would reap it if it had ended
        deadline = time.monotonic() + END_S
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # the process is not reaped yet, so that its group can still be named
        commands.end(self._process)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self.start.can_pause and not self._has_ended():
            commands.signal_group(self._process, number)

    def _has_ended(self) -> bool:
        """Without reaping it."""
        if self._process is None:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "none"


def answers(url: str, path: str) -> bool:
    """Whether it answers 200."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
