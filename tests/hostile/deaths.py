"""Deaths of tritonserver 24.10 that are its own, each by a bug that is documented, and how to tell them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tests.hostile import http_cases
from tests.hostile.case import Case, GrpcCall, HttpExchange
from tests.hostile.grpc_cases import FATAL
from tests.hostile.target import Death

DEEP = 1 << 20  # nested lists, or chunks, in one body


class Bug(NamedTuple):
    name: str
    sentence: str


STRING_LENGTH = Bug(
    "STRING length with triton_grpc_error",
    "With the metadata triton_grpc_error a STRING tensor whose length contradicts its shape ends the server before a "
    "model sees anything.",
)
SHARED_STREAM = Bug(
    "several requests on a stream with triton_grpc_error",
    "With the metadata triton_grpc_error the first refused request ends the stream and frees its state, and the answer "
    "to another request of the same stream is then written to what was freed.",
)
REFUSAL = Bug(
    "a refusal with triton_grpc_error",
    "With the metadata triton_grpc_error even one refused request, answered by a single response with FINAL, now and then "
    "makes the gRPC front use a state of the stream that it has freed.",
)
FRONT = Bug(
    "the gRPC front's own thread",
    "A thread of the gRPC front, with no model on its stack, uses a state of a stream that is gone (SIGSEGV), or starts an "
    "operation on it twice (GRPC_CALL_ERROR_TOO_MANY_OPERATIONS, SIGABRT). Rare without triton_grpc_error: one death in "
    "20,000 malformed requests.",
)
CLASSIFICATION = Bug(
    "an output asked for as classes",
    "A gRPC request that asks for a text output with the parameter classification makes the front divide by the size of "
    "an element, which is 0 for text (SIGFPE): one request of 155 bytes, with or without metadata.",
)
SHAPE = Bug(
    "a huge shape over HTTP",
    "The HTTP front takes memory for as many values as the shape of a tensor says before it counts the values: a request of "
    "150 bytes to /infer of a model that is not decoupled throws in its thread (std::length_error, std::bad_alloc).",
)
STACK = Bug(
    "stack overflow by an HTTP body",
    "The HTTP front parses nested JSON and copies chunks recursively, on a thread's stack, without a limit "
    "(CVE-2025-23310 and CVE-2025-23311, fixed in 25.07).",
)
# Last digits of return addresses in this very binary (they do not change with where it is loaded): a response of a model
# is handed to the gRPC front, as opposed to the front's own threads.
# The frame below libstdc++'s start of a thread: two of the front's own threads have been seen to die.
_FRONT_ALONE = re.compile(r"# 0x[0-9A-F]+(?:88B|9A0) in \S*/tritonserver\n *\d+# 0x[0-9A-F]+ in \S*libstdc")
_FRAMES = re.compile(r"^ *\d+# 0x", re.MULTILINE)
_MODEL_ANSWERS = re.compile(r"in \S*/tritonserver\n *\d+# 0x[0-9A-F]+390 in \S*libtritonserver")


def explanation(death: Death, suspects: Sequence[Case]) -> Bug | None:
    """The documented bug that a death of tritonserver fits, given the requests of its last seconds; None without one.

    A response that meets a freed stream is a bug of 24.10 where another request shares the stream; where the stream has
    one request only, its model has said something after its error, which is ours to mend.
    """
    if death.who != "tritonserver" or death.status not in (-11, -6, -8):
        return None
    if any(isinstance(case.call, HttpExchange) and _depth(case) >= DEEP for case in suspects):
        return STACK
    if death.status == -6 and any(case.kind == http_cases.FATAL for case in suspects):
        return SHAPE
    if death.status == -8:
        return CLASSIFICATION if any(case.kind == FATAL for case in suspects) else None
    strict = [case for case in suspects if isinstance(case.call, GrpcCall) and case.call.grpc_error]
    if any(case.string_length for case in strict):
        return STRING_LENGTH
    if any(case.known_fatal for case in strict):
        return SHARED_STREAM
    if strict and not _MODEL_ANSWERS.search(death.log_tail):
        return REFUSAL
    return FRONT if _FRONT_ALONE.search(death.log_tail) else None


def is_of_the_front_alone(status: int | None, log_tail: str) -> bool:
    """Whether tritonserver died by SIGSEGV or SIGABRT, and not while it handed a model's answer to its gRPC front."""
    return status in (-11, -6) and bool(_FRAMES.search(log_tail)) and not _MODEL_ANSWERS.search(log_tail)


def backtrace(death: Death, limit: int = 12) -> list[str]:
    """The frames that tritonserver wrote when it died."""
    lines = death.log_tail.splitlines()
    frames = [
        line.strip()
        for line in lines
        if re.match(r" *\d+# 0x|Signal \(\d+\) received|malloc|free\(\)|double free", line)
    ]
    return [re.sub(r" in \S*/", " in ", line)[:120] for line in frames][:limit]


def _depth(case: Case) -> int:
    assert isinstance(case.call, HttpExchange)
    return max(sum(piece.count(sign) for piece in case.call.pieces) for sign in (b"[", b"{", b"1\r\n"))
