"""The lines of the gateway's log: text, or with EVERBATCH_LOG_FORMAT=json one JSON object each.

Both are as the models and the engine write them, so that the logs of a server can be read together.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

VARIABLE = "EVERBATCH_LOG_FORMAT"
PROCESS = "gateway"
TEXT = f"%(asctime)s {PROCESS} %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `process`, `logger`, `message`, and what the caller gave as `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": PROCESS,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}), default=str)


def set_up_logging() -> None:
    """Log to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if os.environ.get(VARIABLE) == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it logs values, which may be text of prompts
