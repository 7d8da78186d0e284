"""wait_ready: a start of a real tritonserver that fails by chance is tried again, as `everbatch serve` does."""

from __future__ import annotations

import warnings

from deploy.errors import ServerFailed
from deploy.gateway import ServerWithGateway
from deploy.supervisor import MAX_FIRST_STARTS
from deploy.triton_server import TritonServer

START_TIMEOUT_S = 180


def wait_ready(server: TritonServer | ServerWithGateway, timeout_s: float = START_TIMEOUT_S) -> None:
    """Triton's own locks end or stop one start of some hundred (deploy/supervisor.py)."""
    for starts in range(1, MAX_FIRST_STARTS + 1):
        try:
            return server.wait_ready(timeout_s, on_phase=lambda phase: None)
        except ServerFailed as failure:
            if not failure.by_chance or starts == MAX_FIRST_STARTS:
                raise
            warnings.warn(f"a start is tried again: {failure}", stacklevel=2)
            server.abandon()
            server.start()
    raise AssertionError("unreachable")
