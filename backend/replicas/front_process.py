"""The process of several replicas: `python -m backend.replicas.front_process --config FILE --socket PATH`.

It takes the place of an engine process, and reports to its supervisor in the same way. With `workers.orchestrator` it starts the
replicas as processes of this machine, or through Ray.
"""

from __future__ import annotations

import logging
import signal
import sys

from backend.api.config.schema import EngineConfig
from backend.executor.engine_process import main, tell
from backend.executor.executor import Executor
from backend.executor.kept_files import KeptFiles
from backend.replicas.front import ReplicaFront, listen
from backend.replicas.placement import Placement
from backend.replicas.processes import shut_down, start_processes

log = logging.getLogger("everbatch.replicas")


def serve_replicas(config: EngineConfig, socket_path: str, kept: KeptFiles) -> None:
    """Start the replicas, and serve until SIGTERM. Raises ConfigError or EngineUnavailable."""
    number = config.workers.replicas
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while the replicas start
    tell({"phase": f"starting {number} replica{'s' if number > 1 else ''}"})
    replicas = _started(config, socket_path)
    try:
        front = ReplicaFront(replicas, Placement(), listen(socket_path), config.triton.stats_period_ms / 1000)
        signal.signal(signal.SIGTERM, lambda *_: front.stop())
        for remark in dict.fromkeys(each for one in replicas if one.hello for each in one.hello.model.remarks):
            tell({"remark": remark})
        tell({"ready": True})
        front.run()
    finally:
        shut_down(replicas)


def _started(config: EngineConfig, socket_path: str) -> list[Executor]:
    if config.workers.orchestrator == "ray":
        from backend.replicas.ray_engine import start_in_ray  # only here: Ray is an extra

        return start_in_ray(config, socket_path)
    return start_processes(config, socket_path)


if __name__ == "__main__":
    sys.exit(main(serve_replicas))
