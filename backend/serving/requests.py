"""What both kinds of model read alike: sessions, sampling, flags, limits that concern tensors.

`parse_*` functions are pure: arrays in, Requests out, InvalidRequest for whatever is wrong. Limits on values are
checked again, and more fully, by backend.api.limits inside Executor.submit; here is what must hold before a list is
built.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

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
MAX_REQUEST_ID = 256  # characters
MAX_NAMESPACE = 256  # characters
MAX_PARAMETERS = 65_536  # characters of the JSON of all parameters of one request
ONE_ROW_ONLY = "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"


class Parameters(NamedTuple):
    """Request parameters: what is not a tensor.

    `namespace`: whose request it is, as the client says (`cache_salt` or `namespace` on the wire). KV, sessions and
    request ids of one namespace are out of reach for every other. Requests without one are one party: they can go on
    with, erase and stop each other's.
    """

    timeout_s: float | None = None
    namespace: str = ""


class ServingContext(NamedTuple):
    """What parsing needs to know besides the tensors."""

    config: EngineConfig
    model: ModelInfo
    decoupled: bool = True


class StopSession(NamedTuple):
    """STOP: interrupt the running turn of a session of this namespace; with `end` erase it as well."""

    session_id: SessionId
    end: bool
    namespace: str = ""


class Work(NamedTuple):
    """One row, ready to be handed to the executor."""

    request: Request | StopSession
    output: RowOutput


def parse_parameters(timeout_us: int, parameters_json: str) -> Parameters:
    """`timeout` in microseconds (gRPC's reserved parameter, or a plain one over HTTP), and `cache_salt` or `namespace`.

    Raises InvalidRequest for what cannot be read: a namespace that is passed over would be everybody's.
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


def read_parameters(request: Any) -> Parameters:
    """`parse_parameters` of a Triton request, whose strings may be anything. Raises InvalidRequest."""
    try:
        text = request.parameters()
    except UnicodeDecodeError:
        raise InvalidRequest("the request's parameters are not valid UTF-8; encode text as UTF-8") from None
    return parse_parameters(request.timeout(), text)


def read_request_id(request: Any) -> str:
    """The client's own id of a Triton request. Raises InvalidRequest for one that is no text, or too long: cut short, it
    could be another's, whom a `stop` would then hit.
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
    """Raise InvalidRequest for what a model that is not decoupled cannot answer."""
    if decoupled:
        return
    if any(batch.scalar(streaming_input, row) for row in range(batch.num_rows)):
        raise InvalidRequest(DECOUPLED_ONLY)
    if batch.num_rows > 1:
        raise InvalidRequest(ONE_ROW_ONLY)


def read_stop_session(batch: Batch, row: int, namespace: str) -> StopSession | None:
    """The row's STOP request, or None. Raises SessionError for START with STOP, and for STOP without CORRID."""
    if not batch.scalar("STOP", row):
        return None
    session_id = batch.scalar("CORRID", row)
    if session_id is None:
        raise SessionError(SessionStatus.INVALID, "STOP needs the session's CORRID")
    if batch.scalar("START", row):
        raise SessionError(SessionStatus.INVALID, "START and STOP exclude each other; send one of them")
    return StopSession(SessionId(session_id), end=bool(batch.scalar("END", row)), namespace=namespace)


def read_session(batch: Batch, row: int) -> SessionConfig | None:
    """The session of the row's turn. TurboMind's defaults: START and END are 1 when absent."""
    fields = batch.fields("session", row)
    if "id" not in fields:
        if fields:
            raise SessionError(SessionStatus.INVALID, f"{', '.join(sorted(fields))} of a session needs its CORRID")
        return None
    fields["start"] = bool(fields.get("start", 1))
    fields["end"] = bool(fields.get("end", 1))
    if fields.get("session_len") == 0:  # TurboMind's clients send 0 for no limit
        del fields["session_len"]
    return SessionConfig(**fields)


def read_sampling(batch: Batch, row: int, logit_bias: dict[int, float]) -> SamplingConfig:
    fields = batch.fields("sampling", row)
    if fields.get("top_p", 1.0) <= 0.0:  # clients send 0.0 for "unset"
        del fields["top_p"]
    return SamplingConfig(**fields, logit_bias=logit_bias or None)


def read_output_config(batch: Batch, row: int) -> OutputConfig:
    """The engine never echoes the prompt: whoever wants it in front gets it from the row output."""
    return OutputConfig(**batch.fields("output", row), exclude_input_from_output=True)


def read_settings(batch: Batch, row: int, streaming: bool, num_input_tokens: int) -> RowSettings:
    return RowSettings(
        streaming=streaming,
        num_input_tokens=num_input_tokens,
        batch_index=row if batch.num_rows > 1 else None,
        return_num_input_tokens=bool(batch.scalar("return_num_input_tokens", row)),
        return_num_output_tokens=bool(batch.scalar("return_num_output_tokens", row)),
    )


def echoes_prompt(batch: Batch, row: int, default_exclude: bool) -> bool:
    exclude = batch.scalar("exclude_input_in_output", row)
    return not (default_exclude if exclude is None else exclude)


def required(batch: Batch, name: str, row: int) -> Any:
    """The row's scalar. Triton only counts required inputs, so each one is looked at here."""
    value = batch.scalar(name, row)
    if value is None:
        raise InvalidRequest(f"A value is required for {name}")
    return value


def prompt_too_long(num_tokens: int, max_seq_len: int) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has {num_tokens} tokens, the limit is {max_seq_len - 1}: shorten it, or serve with a larger "
        "model.max_seq_len"
    )
