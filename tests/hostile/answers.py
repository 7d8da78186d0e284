"""What a reply means: its class, and whether it says more than a client should know."""

from __future__ import annotations

import re

from tests.hostile.case import Case, GrpcCall, HttpExchange
from tests.hostile.send import Reply

OK, INVALID, UNSUPPORTED, NOT_FOUND = "OK", "INVALID_ARGUMENT", "UNSUPPORTED", "NOT_FOUND"
UNAVAILABLE, CANCELLED, INTERNAL = "UNAVAILABLE", "CANCELLED", "INTERNAL"
LEFT, CUT, NO_END, UNEXPLAINED = "left by the client", "hung up on", "without an end", "unexplained"
TWICE = "with more than one end"
ALL = (OK, INVALID, UNSUPPORTED, NOT_FOUND, UNAVAILABLE, CANCELLED, LEFT, CUT, INTERNAL, NO_END, TWICE, UNEXPLAINED)

MAX_ERROR = 1_000  # characters of one error text of ours
MAX_SCANNED = 100_000  # characters of a reply that are looked through

_OURS = re.compile(r"(?:^|: )\[(INVALID_ARGUMENT|NOT_FOUND|UNAVAILABLE|UNSUPPORTED|CANCELLED|INTERNAL)\] ")
_FAILED = re.compile(
    r"see (?:the server's|its) log|its log says"
)  # what we say of a failure of our own, in every dialect
# What Triton 24.10 itself says to requests that are wrong, before the model sees them. Its HTTP front calls most of
# them status 500 and its gRPC front INTERNAL, so the status says nothing.
_TRITON = (
    (
        INVALID,
        r"^Error generating stream: ",
    ),  # vLLM's dialect, which has no codes: what is refused, a failure of ours apart
    (CANCELLED, r"^Request was cancelled"),
    (INVALID, r"^(?:invalid_request|authentication)_error: "),  # the OpenAI endpoint's, in the middle of a stream too
    (NOT_FOUND, r"^not_found_error: "),
    (UNAVAILABLE, r"^(?:rate_limit|timeout)_error: |^server_error: .*(?:try again|cannot be reached)"),
    (UNSUPPORTED, r"LoRA feature is not enabled"),
    (UNSUPPORTED, r"doesn't support models with decoupled|not currently supported|decoupled transaction"),
    (NOT_FOUND, r"unknown model|is not found|has no available versions|Not Found|Unimplemented"),
    (INVALID, r"failed to parse the request JSON buffer|attempt to (?:access|get) |Unable to parse"),
    (INVALID, r"out of bounds index \d+: request has \d+ inputs"),  # a request without inputs
    (
        INVALID,
        r"unexpected (?:inference input|shape|inference output)|unexpected (?:additional|number of)|data-type is",
    ),
    (INVALID, r"expected number of inputs|missing required input|byte size mismatch|incomplete string data"),
    (
        INVALID,
        r"has invalid type|can not convert|failed to parse model version|model version|must be|expected \d+ inputs",
    ),
    (
        INVALID,
        r"cannot parse|Unable to |duplicate|invalid|expects|expected|exceeds|incompatible|should|missing|not specified",
    ),
    (
        INVALID,
        r"already exists in request|cannot be longer than|was not found in the JSON|"
        r"must not be specified|unable to find data|has no shape|"
        r"does not match other inputs",
    ),
    (INVALID, r"parameter keys starting with 'triton_' are reserved|length indicator"),
    (UNAVAILABLE, r"restricted"),
)
_BY_HTTP = {
    400: INVALID,
    403: UNAVAILABLE,
    404: NOT_FOUND,
    405: UNSUPPORTED,
    411: INVALID,
    401: INVALID,
    408: UNAVAILABLE,
    413: INVALID,
    415: INVALID,
    422: INVALID,
    429: UNAVAILABLE,
    431: INVALID,
    501: UNSUPPORTED,
    503: UNAVAILABLE,
}
_BY_GRPC = {1: CANCELLED, 3: INVALID, 5: NOT_FOUND, 12: UNSUPPORTED, 14: UNAVAILABLE}

_LEAKS = (
    (
        "a path",
        re.compile(r"(?<![\w:.<])/(?:tmp|home|usr|opt|root|var|proc|dev|etc|lib|srv|mnt|work|workspace|app)/[\w.\-/]+"),
    ),
    ("a Python file", re.compile(r"\w{1,40}\.py\b")),
    ("a traceback", re.compile(r"Traceback|\bFile \"|\bAt:\n")),
    (
        "a line number",
        re.compile(r"\bline \d+\b(?! column)|\.(?:py|cc|cpp|h)[:(]\d+"),
    ),  # a place in the client's JSON is none
    ("an address", re.compile(r"\b0x[0-9a-fA-F]{6,}\b")),
    ("a shared memory region", re.compile(r"triton_python_backend_shm\w*")),
    (
        "a library's words",
        re.compile(
            r"\b(?:numpy|msgspec|pydantic|starlette|uvicorn|tokenizers|NoneType|ufunc)\b|object has no attribute|"
            r"codec can't|invalid literal for|could not convert|not subscriptable|unexpected keyword|<class |dtype\("
        ),
    ),
    ("an exception's text", re.compile(r"\b[A-Z]\w{2,30}(?:Error|Exception): ")),
)


def classify(case: Case, reply: Reply) -> str:
    """The class of one reply, one of ALL."""
    if reply.ending == "left":
        return LEFT
    if reply.ending == "none":
        return LEFT if case.incomplete else NO_END
    if reply.ending == "cut":
        return CUT if case.incomplete else NO_END
    if reply.ends is not None and isinstance(case.call, GrpcCall) and reply.ends != len(case.call.messages):
        return TWICE if reply.ends > len(case.call.messages) else NO_END
    if _FAILED.search(reply.errors):
        return INTERNAL
    if ours := _OURS.search(reply.errors):
        return INTERNAL if "[INTERNAL]" in reply.errors else ours.group(1)
    if not reply.errors and reply.status in (0, 200):
        return OK
    for found, pattern in _TRITON:
        if re.search(pattern, reply.errors):
            return found
    by_status = _BY_HTTP if reply.protocol == "http" else _BY_GRPC
    if reply.status in by_status:
        return by_status[reply.status]
    return INTERNAL if reply.status in (500, 13) else UNEXPLAINED


# Triton's own page on a model's configuration, which names the file that every model of the Python backend has.
_CONFIGURATION = re.compile(r'"default_model_filename"\s*:\s*"model\.py"')


def leaks(case: Case, reply: Reply) -> list[str]:
    """What the reply tells about the inside of the server and the client did not send itself."""
    text = _CONFIGURATION.sub("", f"{reply.errors[:MAX_SCANNED]}\n{reply.other[:MAX_SCANNED]}")
    found = [f"a text of {len(reply.errors)} characters"] if _is_long(case, reply) else []
    for what, pattern in _LEAKS:
        for match in pattern.finditer(text):
            if not _sent(case, match.group()):
                found.append(f"{what}: {match.group()[:80]!r}")
                break
    return found


def _is_long(case: Case, reply: Reply) -> bool:
    """Whether an error of ours repeats more of what was sent than helps."""
    ours = _OURS.search(reply.errors) or (isinstance(case.call, HttpExchange) and case.call.to_gateway)
    return bool(ours) and max(map(len, reply.errors.splitlines()), default=0) > MAX_ERROR


def _sent(case: Case, text: str) -> bool:
    pieces = case.call.pieces if isinstance(case.call, HttpExchange) else case.call.messages
    return any(text.encode() in piece for piece in pieces)


def protocol(case: Case) -> str:
    return "grpc" if isinstance(case.call, GrpcCall) else "http"
