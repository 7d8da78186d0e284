"""What a process of a server sets up when it starts: its log lines, the garbage collector, and how many cores it may use.

Log lines are text, or with EVERBATCH_LOG_FORMAT=json one JSON object each. A JSON line has `time` (UTC, ISO 8601), `level`,
`process`, `logger` and `message`, with `exception` where there is one, and what the caller gave as `extra={"fields": {...}}`
besides. tritonserver's own lines stay as Triton writes them.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

VARIABLE = "EVERBATCH_LOG_FORMAT"
THRESHOLD = 20_000  # new container objects that trigger a collection of the young generation


class JsonLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}), default=str)


def set_up_logging(process: str) -> None:
    """Log to standard error from now on, as `process`: the name of the model, or `engine`."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get(VARIABLE) == "json":
        handler.setFormatter(JsonLines(process))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def calm_garbage_collector() -> None:
    """Exempt all present objects from garbage collection, and collect later ones seldom. Call it when everything is loaded.

    Otherwise a full collection visits every object of torch, which takes 60 ms within a step, and the small collections take
    a fifth of the host's time at 256 rows. They would find little, because neither a step of the engine nor a response in a
    stub makes reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once where the kernel tells."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.is_file() else str(cpu))
    return max(1, len(cores))
