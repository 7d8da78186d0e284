"""The request log: one line on standard error for each request that has ended. It never holds text of a request.

With EVERBATCH_LOG_FORMAT=json each line is a JSON object, otherwise `key=value` behind the word `request`. A namespace
appears as a part of its hash, so that the lines of one client can be found together; a guessed namespace can
be checked against its hash. Text from clients (the request id) is escaped as in JSON, so no line can be forged.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from backend.serving.observe.ended import EndedRow

FORMAT_VARIABLE = "EVERBATCH_LOG_FORMAT"  # json, or text
HASH_CHARS = 12  # hexadecimal digits of a namespace's SHA-256 that are shown

Value = str | int | float | None


class RequestLog:
    def __init__(self, model: str, as_json: bool | None = None, write: Callable[[str], None] | None = None) -> None:
        """`as_json`: None asks the environment. `write` takes one whole line; without it lines go to standard error."""
        self._model = model
        self._as_json = os.environ.get(FORMAT_VARIABLE, "") == "json" if as_json is None else as_json
        self._write = write or _to_stderr

    def add(self, row: EndedRow) -> None:
        """Write the line of one row."""
        fields = describe(self._model, row)
        self._write(json.dumps(self._head() | fields) + "\n" if self._as_json else _as_text(fields))

    def _head(self) -> dict[str, Value]:
        """The fields that every JSON line of a server has (backend/api/processes/setup.py)."""
        return {"level": "INFO", "process": self._model, "logger": "everbatch.requests", "message": "request ended"}


def describe(model: str, row: EndedRow) -> dict[str, Value]:
    """The fields of a line. Unknown fields are left out; a time is absent if the event never happened."""
    account = row.account
    fields: dict[str, Value] = {
        "time": datetime.fromtimestamp(row.wall_time, UTC).isoformat(timespec="milliseconds"),
        "event": "request",
        "model": model,
        "request_id": row.request_id,
        "row": row.row,
        "namespace": hash_of(row.namespace) if row.namespace else None,
        "reason": row.reason,
        "code": row.code or None,
        "prompt_tokens": row.num_prompt_tokens,
        "cached_tokens": None if account is None else account.num_cached_tokens,
        "recomputed_tokens": None if account is None else account.num_recomputed_tokens,
        "output_tokens": row.num_output_tokens,
        "prepare_ms": _ms(row.prepare_s),
        "queue_ms": _ms(row.queue_s),
        "first_token_ms": _ms(row.first_token_s),
        "total_ms": _ms(row.total_s),
    }
    return {name: value for name, value in fields.items() if value is not None}


def hash_of(namespace: str) -> str:
    """The form in which the log shows a namespace."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:HASH_CHARS]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _as_text(fields: dict[str, Value]) -> str:
    request_id = json.dumps(fields["request_id"]).replace("\x7f", "\\u007f")
    shown = {**fields, "request_id": request_id}
    pairs = " ".join(f"{name}={value}" for name, value in shown.items() if name not in ("time", "event"))
    return f"{fields['time']} request {pairs}\n"


def _to_stderr(line: str) -> None:
    # One line at a time: what is written at once stays together, though all stubs share the file.
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except OSError:  # For example, the disk is full. The launcher reports it, and the request has been answered.
        pass
