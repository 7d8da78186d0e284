"""Reads the parts of a request that token models and text models share: sessions, sampling, flags and parameters.

The functions are pure: they make values of arrays, and raise InvalidRequest for whatever is wrong. They check only what must
hold before a list is built. The engine checks all values against backend.api.limits.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

from backend.api import (
    EngineConfig,
    InvalidRequest,
    OutputConfig,
    Request,
    SamplingConfig,
    SessionConfig,
    SessionError,
    SessionId,
    SessionStatus,
    Unsupported,
)
from backend.core.step import ModelInfo
from backend.serving.outputs import RowOutput, RowSettings
from backend.serving.reading import Batch

DECOUPLED_ONLY = "Streaming is only supported in decoupled mode."
MAX_REQUEST_ID = 256  # the most characters of a request id
MAX_NAMESPACE = 256  # the most characters of a namespace
MAX_PARAMETERS = 65_536  # the most characters of JSON in which a request's parameters may come
ONE_ROW_ONLY = "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"


class RequestHeader(Protocol):
    """The part of Triton's InferenceRequest that is read here."""

    def request_id(self) -> str: ...

    def timeout(self) -> int: ...

    def parameters(self) -> str: ...


class Parameters(NamedTuple):
    """The parameters of a request, which are no tensors.

    `namespace` says whose request it is, as the client names itself (`cache_salt` or `namespace` on the wire). KV, sessions
    and request ids of one namespace are out of reach for every other. All requests without a namespace are one party, which
    can go on with, erase and stop each other's sessions and requests.
    """

    timeout_s: float | None = None
    namespace: str = ""


class ServingContext(NamedTuple):
    """What parsing needs to know besides the request."""

    config: EngineConfig
    model: ModelInfo
    decoupled: bool = True


class StopSession(NamedTuple):
    """A STOP request. It interrupts the running turn of a session of this namespace, and with `end` erases the session."""

    session_id: SessionId
    end: bool
    namespace: str = ""


class Work(NamedTuple):
    """One row that is ready to be handed to the executor, and the output that will answer it."""

    request: Request | StopSession
    output: RowOutput


def parse_parameters(timeout_us: int, parameters_json: str) -> Parameters:
    """Read the timeout in microseconds, and `cache_salt` or `namespace`.

    `timeout_us` is gRPC's reserved parameter for it. Over HTTP it comes as a plain parameter `timeout` among the others.
    Raises InvalidRequest for what cannot be read, because a request whose namespace is overlooked would be open to everybody.
    """
    if len(parameters_json) > MAX_PARAMETERS:
        raise InvalidRequest(
            f"the request's parameters hold {len(parameters_json)} characters, the limit is {MAX_PARAMETERS}; send less"
        )
    try:
        extra = json.loads(parameters_json) if parameters_json else {}
    except (ValueError, RecursionError):
        raise InvalidRequest("the request's parameters cannot be read as JSON; send plain names and values") from None
    if not isinstance(extra, dict):
        raise InvalidRequest("the request's parameters are no JSON object; send plain names and values")
    timeout = timeout_us or extra.get("timeout") or 0
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
        raise InvalidRequest(f"timeout is {str(timeout)[:40]}, a positive number of microseconds is expected")
    kind = extra.get("request_type", "context_and_generation")
    if kind != "context_and_generation":
        raise Unsupported(
            f"request_type {str(kind)[:40]!r} is disaggregated serving, which this version does not have; leave it out"
        )
    return Parameters(timeout / 1e6 if timeout else None, _namespace(extra))


def _namespace(extra: dict[str, Any]) -> str:
    given = {name: extra[name] for name in ("cache_salt", "namespace") if name in extra}
    for name, value in given.items():
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} is no string; send a string of at most {MAX_NAMESPACE} characters")
        if len(value) > MAX_NAMESPACE:
            raise InvalidRequest(f"{name} has {len(value)} characters, the limit is {MAX_NAMESPACE}; use a shorter one")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise InvalidRequest(f"{name} holds a lone surrogate, which is no text; use other characters")
    if len(set(given.values())) > 1:
        raise InvalidRequest("cache_salt and namespace name the same thing and differ; send one of them")
    return next(iter(given.values()), "")


def read_parameters(request: RequestHeader) -> Parameters:
    """Parse the parameters of a Triton request, which may hold any bytes. Raises InvalidRequest."""
    try:
        text = request.parameters()
    except UnicodeDecodeError:
        raise InvalidRequest("the request's parameters are not valid UTF-8; encode text as UTF-8") from None
    return parse_parameters(request.timeout(), text)


def read_request_id(request: RequestHeader) -> str:
    """The client's own id of a Triton request. Raises InvalidRequest for an id that is no text or too long.

    A long id is not cut short, because it could then equal the id of another request, which a `stop` would hit.
    """
    try:
        request_id = str(request.request_id())
    except UnicodeDecodeError:
        raise InvalidRequest("the request id is not valid UTF-8; encode it as UTF-8") from None
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidRequest(
            f"the request id has {len(request_id)} characters, the limit is {MAX_REQUEST_ID}; use a shorter one"
        )
    return request_id


def check_mode(batch: Batch, streaming_input: str, decoupled: bool) -> None:
    """Raise InvalidRequest when a model that is not decoupled is asked to stream or for more than one row."""
    if decoupled:
        return
    if any(batch.scalar(streaming_input, row) for row in range(batch.num_rows)):
        raise InvalidRequest(DECOUPLED_ONLY)
    if batch.num_rows > 1:
        raise InvalidRequest(ONE_ROW_ONLY)


def read_stop_session(batch: Batch, row: int, namespace: str) -> StopSession | None:
    """The row's STOP request, or None if it is none. Raises SessionError for STOP with START or without CORRID."""
    if not batch.scalar("STOP", row):
        return None
    session_id = batch.scalar("CORRID", row)
    if session_id is None:
        raise SessionError(SessionStatus.INVALID, "STOP needs the session's CORRID")
    if batch.scalar("START", row):
        raise SessionError(SessionStatus.INVALID, "START and STOP exclude each other; send one of them")
    return StopSession(SessionId(session_id), end=bool(batch.scalar("END", row)), namespace=namespace)


def read_session(batch: Batch, row: int) -> SessionConfig | None:
    """The row's session, or None without CORRID. START and END are 1 when absent, as in TurboMind.

    Raises SessionError when other inputs of a session come without CORRID.
    """
    fields = batch.fields("session", row)
    if "id" not in fields:
        if fields:
            raise SessionError(SessionStatus.INVALID, f"{', '.join(sorted(fields))} of a session needs its CORRID")
        return None
    fields["start"] = bool(fields.get("start", 1))
    fields["end"] = bool(fields.get("end", 1))
    if fields.get("session_len") == 0:  # TurboMind's clients send 0 when they want no limit.
        del fields["session_len"]
    return SessionConfig(**fields)


def read_sampling(batch: Batch, row: int, logit_bias: dict[int, float]) -> SamplingConfig:
    """The row's sampling configuration with this bias, which maps token ids to what is added to their logits."""
    fields = batch.fields("sampling", row)
    if fields.get("top_p", 1.0) <= 0.0:  # Clients send 0.0 when they leave it unset.
        del fields["top_p"]
    return SamplingConfig(**fields, logit_bias=logit_bias or None)


def read_output_config(batch: Batch, row: int) -> OutputConfig:
    """The row's output configuration. The engine never echoes the prompt, because the row's output does that."""
    return OutputConfig(**batch.fields("output", row), exclude_input_from_output=True)


def read_settings(batch: Batch, row: int, streaming: bool, num_input_tokens: int) -> RowSettings:
    """How the row is to be answered."""
    return RowSettings(
        streaming=streaming,
        num_input_tokens=num_input_tokens,
        batch_index=row if batch.num_rows > 1 else None,
        return_num_input_tokens=bool(batch.scalar("return_num_input_tokens", row)),
        return_num_output_tokens=bool(batch.scalar("return_num_output_tokens", row)),
    )


def echoes_prompt(batch: Batch, row: int, default_exclude: bool) -> bool:
    """Whether the prompt comes first in the answer. `default_exclude` holds where the request does not say."""
    exclude = batch.scalar("exclude_input_in_output", row)
    return not (default_exclude if exclude is None else exclude)


def required(batch: Batch, name: str, row: int) -> Any:
    """The row's scalar. Raises InvalidRequest when it is absent, which Triton does not find out by itself."""
    value = batch.scalar(name, row)
    if value is None:
        raise InvalidRequest(f"A value is required for {name}")
    return value


def prompt_too_long(num_tokens: int, max_seq_len: int) -> InvalidRequest:
    """The error for a prompt that leaves no room for one output token."""
    return InvalidRequest(
        f"the prompt has {num_tokens} tokens, the limit is {max_seq_len - 1}: shorten it, or serve with a larger "
        "model.max_seq_len"
    )
