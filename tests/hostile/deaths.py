"""Deaths of tritonserver 24.10 that are its own, each by a bug that is documented, and how to tell them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tests.hostile.case import Case, GrpcCall, HttpExchange
from tests.hostile.target import Death

DEEP = 1 << 20  # nested lists, or chunks, in one body


class Bug(NamedTuple):
    name: str
    sentence: str


STRING_LENGTH = Bug(
    "STRING length with triton_grpc_error",
    "With the metadata triton_grpc_error a STRING tensor whose length contradicts its shape makes the gRPC front use a "
    "request that it has already released: it dies before a model sees anything.",
)
STACK = Bug(
    "stack overflow by an HTTP body",
    "The HTTP front parses nested JSON and copies chunks recursively, on a thread's stack, without a limit "
    "(CVE-2025-23310 and CVE-2025-23311, fixed in 25.07).",
)


def explanation(death: Death, suspects: Sequence[Case]) -> Bug | None:
    """The documented bug that a death of tritonserver fits, given the requests that were under way; None without one."""
    if death.who != "tritonserver" or death.status not in (-11, -6):
        return None
    if any(case.string_length and isinstance(case.call, GrpcCall) and case.call.grpc_error for case in suspects):
        return STRING_LENGTH
    if any(isinstance(case.call, HttpExchange) and _depth(case) >= DEEP for case in suspects):
        return STACK
    return None


def backtrace(death: Death, limit: int = 12) -> list[str]:
    """The frames that tritonserver wrote when it died."""
    lines = death.log_tail.splitlines()
    start = next((n for n, line in enumerate(lines) if re.search(r"Signal \(\d+\) received", line)), None)
    return [line.strip()[:160] for line in lines[start or 0 :] if start is not None][: limit + 1]


def _depth(case: Case) -> int:
    assert isinstance(case.call, HttpExchange)
    return max(sum(piece.count(sign) for piece in case.call.pieces) for sign in (b"[", b"{", b"1\r\n"))
