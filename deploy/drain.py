"""Ends a server that still serves: new requests are refused, running ones may finish, and those that are cut off get an error.

Order of side effects:
1. The gRPC port refuses new connections; then SIGTERM to tritonserver, whose HTTP port refuses them too. What has just come in
   by a connection still reaches its model.
2. SIGUSR1 to the stubs. They refuse new requests, and end those that still run after the exit timeout with UNAVAILABLE.
3. Once every stub says that all is answered, the server has UNLOAD_S to unload its models and to end.

What Triton itself says of requests in flight leaves out streams. It counts only where a model gives no signs of life.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from backend.api.processes.liveness import TICK_S
from deploy import doors, health, server_log
from deploy.processes import catches, processes_of_run, read_stat, send_signal, stubs_of
from deploy.signs import Signs

LINGER_S = 0.4  # for a request whose connection was made before the port was closed
LAST_WORDS_S = 4.0  # past the exit timeout: stubs look at it once a second, and their errors have to be sent
# Triton's gRPC front may keep a finished request, and with it a model that then never unloads (seen with 24.10, about every
# third time), and its HTTP front waits for idle connections. So it is of no use to wait longer.
UNLOAD_S = 4.0
FOLLOWERS_S = 3.0  # for stubs, engine and endpoint, which end by themselves after the server
SERVER_MARGIN_S = 15  # by which Triton's own --exit-timeout-secs is longer: the launcher decides, not Triton


class ServerStop:
    """One stop of one server. `num_models`: how many it serves, with and without signs of life."""

    def __init__(
        self,
        server: subprocess.Popen[bytes],
        run_id: str,
        grpc_port: int,
        signs: Signs,
        num_models: int,
        log_path: Path,
        cancelled: Callable[[], bool],
    ) -> None:
        self._server, self._run_id, self._grpc_port = server, run_id, grpc_port
        self._signs, self._num_models, self._log_path = signs, num_models, log_path
        self._cancelled = cancelled

    def run(self, timeout_s: float) -> None:
        """Let requests run for at most `timeout_s`. Returns when the server has ended, or should not be waited for any more."""
        self._ask()
        deadline = time.monotonic() + timeout_s + LAST_WORDS_S
        self._wait(deadline, lambda: self._has_ended() or self._is_over())
        self._wait(time.monotonic() + UNLOAD_S, self._has_ended)
        self._wait(time.monotonic() + FOLLOWERS_S, lambda: not processes_of_run(self._run_id))

    def _ask(self) -> None:
        # A stub without a handler of the signal would be killed by it.
        stubs = [stub for stub in stubs_of(self._server.pid) if catches(stub.pid, signal.SIGUSR1)]
        with doors.closing(self._server.pid, self._grpc_port):
            self._wait(time.monotonic() + LINGER_S, lambda: False)
        self._server.send_signal(signal.SIGTERM)
        self._wait(time.monotonic() + LINGER_S, lambda: False)
        for stub in stubs:
            send_signal(stub, signal.SIGUSR1)

    def _has_ended(self) -> bool:
        return self._server.poll() is not None

    def _is_over(self) -> bool:
        reports = self._signs.look()
        some_say_nothing = len({report.model for report in reports}) < self._num_models
        if some_say_nothing and not server_log.is_unloading(server_log.tail(self._log_path)):
            return False
        return health.drained([report for report in reports if read_stat(report.pid) is not None])

    def _wait(self, deadline: float, condition: Callable[[], bool]) -> None:
        while not condition() and not self._cancelled() and (left := deadline - time.monotonic()) > 0:
            time.sleep(
                min(left, TICK_S / 5)
            )  # Ends of processes, signs of stubs and `cancelled` do not wake this thread.
