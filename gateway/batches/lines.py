"""A line of an input file, and the lines of output and error files, as OpenAI has them.

A batch one of whose lines is no request at all fails as a whole, and says which lines and why. A line whose request is refused by
its endpoint fails alone: the answer that the endpoint would give stands in the error file.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.batches.records import Fault

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
LONGEST_ID = 512  # characters of a custom_id
MOST_REQUESTS = 50_000  # in one batch, as with OpenAI
MOST_FAULTS = 100  # that a batch lists
_SHOWN = 60  # characters of a value in a sentence


class BatchLine(Struct):
    """Other keys are left alone."""

    custom_id: str
    method: str
    url: str
    body: Raw


class _Body(Struct):
    """The parts of a body that the batch as a whole depends on. Its endpoint checks the rest."""

    model: Any = None
    stream: Any = None


class Checker:
    """Checks the lines of an input file, one after the other."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._seen: dict[str, int] = {}  # custom_id -> its line
        self.faults: list[Fault] = []
        self.total = 0
        self.model: str | None = None  # that of the first line

    @property
    def is_over(self) -> bool:
        """True if further lines would change nothing."""
        return len(self.faults) >= MOST_FAULTS or self.total > MOST_REQUESTS

    def check(self, number: int, data: bytes) -> None:
        """`number`: that of the line in its file, from 1. Empty lines are no requests."""
        if not data.strip():
            return
        self.total += 1
        fault = self._fault(number, data)
        if fault is not None:
            fault.line = number
            self.faults.append(fault)

    def end(self) -> None:
        """All lines have been checked."""
        if self.total > MOST_REQUESTS:
            text = f"the file has more than {MOST_REQUESTS} requests, the limit of a batch; make several batches"
            self.faults = [Fault(code="too_many_requests", message=text)]
        elif not self.total:
            self.faults = [Fault(code="empty_file", message="the file holds no request; each line is a JSON object")]

    def _fault(self, number: int, data: bytes) -> Fault | None:
        place = "the line"
        try:
            line = msgspec.json.decode(data, type=BatchLine)
            place = "body"
            body = msgspec.json.decode(line.body, type=_Body)
        except msgspec.ValidationError as error:
            return _misfit(place, str(error))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            text = "is nested too deeply" if isinstance(error, RecursionError) else f"is no JSON: {error}"
            return Fault(code="invalid_json_line", message=f"{place} {text[:200]}")
        if not 1 <= len(line.custom_id) <= LONGEST_ID:
            text = f"custom_id has {len(line.custom_id)} characters, allowed are 1 to {LONGEST_ID}"
            return Fault(code="invalid_custom_id", message=text, param="custom_id")
        if (before := self._seen.setdefault(line.custom_id, number)) != number:
            text = f"custom_id {_shown(line.custom_id)} stands in line {before} already; give each line its own"
            return Fault(code="duplicate_custom_id", message=text, param="custom_id")
        if line.method != "POST":
            return Fault(code="invalid_method", message=f"method is {_shown(line.method)}; it is POST", param="method")
        if line.url != self._endpoint:
            text = f"url is {_shown(line.url)}, the endpoint of the batch is {self._endpoint}; they are the same"
            return Fault(code="invalid_url", message=text, param="url")
        if body.stream not in (None, False):
            text = "body.stream is set, and a batch does not stream; leave it out"
            return Fault(code="invalid_value", message=text, param="body.stream")
        if self.model is None and isinstance(body.model, str):
            self.model = body.model[:256]
        return None


def _misfit(place: str, reason: str) -> Fault:
    """The JSON at this place has another form; `reason` is msgspec's."""
    if "missing required field" in reason:
        name = reason.partition("`")[2].partition("`")[0]
        return Fault(code="missing_required_parameter", message=f"{name} is missing", param=name)
    what, _, path = reason.partition(" - at `$.")
    name = path.rstrip("`") or (place if place == "body" else "")
    code = "invalid_value" if name else "invalid_json_line"
    return Fault(code=code, message=f"{name or place}: {what[:1].lower()}{what[1:160]}", param=name or None)


def _shown(value: str) -> str:
    return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")


class _Answer(Struct):
    id: str
    custom_id: str
    response: dict[str, Any] | None
    error: dict[str, str] | None


def answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The line of an answer of the endpoint. `body`: its JSON."""
    response = {"status_code": status, "request_id": request_id, "body": Raw(body)}
    return msgspec.json.encode(_Answer(_new_id(), custom_id, response, None)) + b"\n"


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that was not sent to its endpoint."""
    return msgspec.json.encode(_Answer(_new_id(), custom_id, None, {"code": code, "message": message})) + b"\n"


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


class _Details(Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(Struct):
    """That of all endpoints."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answered(Struct):
    usage: _Usage | UnsetType = UNSET


_answered = msgspec.json.Decoder(_Answered).decode


def usage_in(body: bytes) -> tuple[int, int, int, int]:
    """The counts of records.Usage in the JSON of an answer."""
    usage = _answered(body).usage
    if usage is UNSET:
        return 0, 0, 0, 0
    given = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    made = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return (
        usage.prompt_tokens + usage.input_tokens,
        given.cached_tokens,
        usage.completion_tokens + usage.output_tokens,
        made.reasoning_tokens,
    )
