"""The lines that the processes of a server log: text, or with EVERBATCH_LOG_FORMAT=json one JSON object each.

A JSON line has `time` (UTC, ISO 8601), `level`, `process`, `logger` and `message`, with `exception` where there is one, and what
the caller gave as `extra={"fields": {...}}` besides. tritonserver's own lines stay as Triton writes them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

VARIABLE = "EVERBATCH_LOG_FORMAT"


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
