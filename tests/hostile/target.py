"""The server under fire: started, looked at, and after a death of tritonserver started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backend.api import load_config
from deploy.gateway import GatewayOptions, ServerWithGateway
from deploy.ports import Ports
from deploy.processes import STUB_NAME, Process, processes_of_run
from deploy.repository import DEFAULT_PROFILE
from deploy.triton_server import TritonServer
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.hostile.repository import write_other_fronts
from tests.hostile.served import ADDED

LOG_TAIL_BYTES = 64 << 10


@dataclass(frozen=True)
class Death:
    """An end that nobody asked for. `who`: tritonserver, or a process of ours by name."""

    who: str
    status: int | None
    log_tail: str
    log_path: Path


class Target:
    """One server at a time, of every front, with the OpenAI endpoint. Call start(), look() and stop() on the thread that made
    it: the server dies with that one.
    """

    def __init__(self, directory: Path, overrides: tuple[str, ...] = ()) -> None:
        # A pool that is soon full: what the engine grows by afterwards is no KV.
        self._config = load_config(overrides=[*EXACT, "kv_cache.max_tokens=50000", *overrides])
        self._directory = directory
        self._starts = 0
        self._known: dict[int, tuple[str, Process]] = {}
        self._first = ""
        self._both = self._new_server()

    @property
    def server(self) -> TritonServer:
        return self._both.server

    @property
    def gateway_url(self) -> str:
        return self._both.url

    def start(self) -> None:
        """Start a server with a log of its own and note its processes. Raises ServerFailed."""
        self._starts += 1
        self._both = self._new_server()
        self._both.start()
        wait_ready(self._both)
        self._known = {process.pid: (name_of(process.pid), process) for process in processes_of_run(self.server.run_id)}

        self._first = ""

    def stop(self) -> None:
        self._both.stop()

    def watch(self) -> None:
        """Note which process is the first to die: tritonserver takes the others with it, and a stub tritonserver."""
        gone = [name for name, process in list(self._known.values()) if not process.alive()]
        self._first = self._first or ", ".join(gone)

    def look(self) -> list[Death]:
        """Who has died since the last look. When tritonserver is gone the others follow it, and do not count; but when
        a stub went first, it took tritonserver with it.
        """
        if not self.server.running():
            first_was_ours = self._first and "tritonserver" not in self._first
            return [self._death(self._first if first_was_ours else "tritonserver", self.server.exit_status)]
        gone = [(pid, name) for pid, (name, process) in self._known.items() if not process.alive()]
        for pid, _ in gone:
            del self._known[pid]
        for process in processes_of_run(self.server.run_id):
            if process.pid not in self._known and (name := name_of(process.pid)) != "other":
                self._known[process.pid] = (name, process)
                gone.append((process.pid, f"{name} (a new one)"))
        return [self._death(name, None) for _, name in gone]

    def memory(self) -> dict[str, float]:
        """Resident megabytes by name of the process."""
        return {name: megabytes(pid) for pid, (name, process) in self._known.items() if process.alive()}

    def descriptors(self) -> dict[str, float]:
        """Open files and sockets by name of the process; tritonserver keeps connections of its own accord."""
        living = {name: pid for pid, (name, process) in self._known.items() if process.alive()}
        return {f"descriptors of {name}": _descriptors(pid) for name, pid in living.items() if name != "tritonserver"}

    def log_bytes(self) -> int:
        return self.server.log_path.stat().st_size

    def _new_server(self) -> ServerWithGateway:
        run_dir = self._directory / f"server-{self._starts}"
        others = write_other_fronts(self._directory / "fronts", ADDED)
        server = TritonServer(
            self._config,
            run_dir=run_dir,
            profiles=(DEFAULT_PROFILE,),
            model_repository=others,
            exit_timeout_s=5,
        )
        taken = (server.ports.http, server.ports.grpc, server.ports.metrics)
        found = Ports.free()
        free = next(port for port in (found.http, found.grpc, found.metrics, 0) if port not in taken)
        return ServerWithGateway(server, GatewayOptions(free, names=("everbatch",)))

    def _death(self, who: str, status: int | None) -> Death:
        time.sleep(0.2)  # the last words are still being written
        path = self.server.log_path
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return Death(who, status, file.read().decode(errors="replace"), path)


def name_of(pid: int) -> str:
    """What a process of the run is, by its command line; `other` for helpers that come and go."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # gone meanwhile
        return "other"
    if Path(words[0]).name == STUB_NAME:
        model = next((Path(word).parent.parent.name for word in words if word.endswith("model.py")), "?")
        return f"stub {model}"
    if Path(words[0]).name == "tritonserver":
        return "tritonserver"
    if "backend.executor.engine_process" in words:
        return "engine"
    return "gateway" if words[-1:] != ["deploy.janitor"] and "gateway" in words else "other"


def megabytes(pid: int) -> float:
    """Resident memory of a process in MB, 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def _descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:  # It is gone meanwhile.
        return 0


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
