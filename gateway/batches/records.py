"""A file and a batch as they are kept, and as OpenAI's clients see them. Times are Unix seconds."""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec
from msgspec import Struct

KEPT_S = 30 * 24 * 3600  # OpenAI keeps files of batches as long
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = ("failed", "completed", "expired", "cancelled")
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class FileRecord(Struct, kw_only=True):
    """`number` orders files by their creation, and is part of the keys of their lines. One is `ready` once it is written."""

    id: str
    namespace: str
    filename: str
    purpose: str
    created_at: int
    expires_at: int
    number: int = 0
    num_bytes: int = 0
    num_lines: int = 0
    ready: bool = False

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Fault(Struct, kw_only=True):
    """A line of an input file for which the whole batch fails."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Usage(Struct):
    """Tokens of all lines that have been answered."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def shown(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class BatchRecord(Struct, kw_only=True):
    """`client`: the name of the key that made it. `is_local`: only a program of this machine can have made it. `times`: when it
    came to each status. `output` and `errors_in`: the files that are written while it runs; once it has ended, clients see the
    ids of files that have lines.
    """

    id: str
    namespace: str
    client: str
    endpoint: str
    completion_window: str
    input_file_id: str
    created_at: int
    expires_at: int
    is_local: bool
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    model: str | None = None
    output: str = ""
    errors_in: str = ""
    output_kept_s: int = KEPT_S
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    faults: list[Fault] = []
    times: dict[str, int] = {}
    usage: Usage = msgspec.field(default_factory=Usage)

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def shown(self) -> dict[str, Any]:
        errors = [
            {"code": one.code, "message": one.message, "param": one.param, "line": one.line} for one in self.faults
        ]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output if self.has_ended and self.has_output else None,
            "error_file_id": self.errors_in if self.has_ended and self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage.shown(),
            "metadata": self.metadata,
        }


def new_id(kind: str) -> str:
    """`file-` and `batch_`, as OpenAI's begin."""
    return f"{kind}{secrets.token_hex(16)}"
