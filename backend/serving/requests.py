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
ONE_ROW_ONLY = "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"


class Parameters(NamedTuple):
    """Request parameters: what is not a tensor."""

    timeout_s: float | None = None
    cache_salt: str = ""


class ServingContext(NamedTuple):
    """What parsing needs to know besides the tensors."""

    config: EngineConfig
    model: ModelInfo
    decoupled: bool = True


class StopSession(NamedTuple):
    """STOP: interrupt the running turn of a session; with `end` erase it as well."""

    session_id: SessionId
    end: bool


class Work(NamedTuple):
    """One row, ready to be handed to the executor."""

    request: Request | StopSession
    output: RowOutput


def parse_parameters(timeout_us: int, parameters_json: str) -> Parameters:
    """`timeout` in microseconds (gRPC's reserved parameter, or a plain one over HTTP) and `cache_salt`."""
    try:
        extra = json.loads(parameters_json) if parameters_json else {}
    except json.JSONDecodeError:
        extra = {}
    if not isinstance(extra, dict):
        extra = {}
    timeout = timeout_us or extra.get("timeout") or 0
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
        raise InvalidRequest(f"timeout is {str(timeout)[:40]}, a positive number of microseconds is expected")
    salt = extra.get("cache_salt", "")
    if not isinstance(salt, str):
        raise InvalidRequest("cache_salt is no string; send a string of at most 256 characters")
    kind = extra.get("request_type", "context_and_generation")
    if kind != "context_and_generation":
        raise Unsupported(
            f"request_type {str(kind)[:40]!r} is disaggregated serving, which this version does not have; leave it out"
        )
    return Parameters(timeout / 1e6 if timeout else None, salt)


def check_mode(batch: Batch, streaming_input: str, decoupled: bool) -> None:
    """Raise InvalidRequest for what a model that is not decoupled cannot answer."""
    if decoupled:
        return
    if any(batch.scalar(streaming_input, row) for row in range(batch.num_rows)):
        raise InvalidRequest(DECOUPLED_ONLY)
    if batch.num_rows > 1:
        raise InvalidRequest(ONE_ROW_ONLY)


def read_stop_session(batch: Batch, row: int) -> StopSession | None:
    """The row's STOP request, or None. Raises SessionError for START with STOP, and for STOP without CORRID."""
    if not batch.scalar("STOP", row):
        return None
    session_id = batch.scalar("CORRID", row)
    if session_id is None:
        raise SessionError(SessionStatus.INVALID, "STOP needs the session's CORRID")
    if batch.scalar("START", row):
        raise SessionError(SessionStatus.INVALID, "START and STOP exclude each other; send one of them")
    return StopSession(SessionId(session_id), end=bool(batch.scalar("END", row)))


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
