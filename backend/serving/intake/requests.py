"""Request parameters and ids, which all models read alike, and the context in which a front parses a request.

The `parse` function of a front is pure: arrays in, Requests out, InvalidRequest for whatever is wrong. Limits on values
are checked again, and more fully, by backend.api.limits inside Executor.submit; here is what must hold before a list is
built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from backend.api import EngineConfig, InvalidRequest
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.phases import BOTH, check_has_phases, read_request_type
from backend.serving.observe.trace_context import NO_CALLER, Caller
from backend.serving.protocols import RequestHeader
from backend.serving.tensors import ModelTensors

DECOUPLED_ONLY = "Streaming is only supported in decoupled mode."
MAX_REQUEST_ID = 256  # the most characters of a request id
MAX_NAMESPACE = 256  # the most characters of a namespace
MAX_PARAMETERS = 65_536  # the most characters of JSON in which a request's parameters may come
ONE_ROW_ONLY = "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"


# Parameters that Triton, its clients and proxies use, besides all that begin with triton_, sequence_ or nv_.
TRITONS_OWN = {"binary_data_output", "binary_data_size", "headers", "priority"}
NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})
OURS = {"timeout", "cache_salt", "namespace", "request_type", "traceparent", "tracestate"}


class Parameters(NamedTuple):
    """The parameters of a request, which are no tensors.

    `namespace` says whose request it is, as the client names itself (`cache_salt` or `namespace` on the wire). KV, sessions
    and request ids of one namespace are out of reach for every other. All requests without a namespace are one party, which
    can go on with, erase and stop each other's sessions and requests.
    """

    timeout_s: float | None = None
    namespace: str = ""
    caller: Caller = NO_CALLER
    request_type: str = BOTH  # the phases that this server is to run (serving/intake/phases.py)
    others: dict[str, Any] = {}  # parameters that only some models understand; read-only


class ServingContext(NamedTuple):
    """The context in which a request is parsed."""

    config: EngineConfig
    model: ModelInfo
    decoupled: bool = True
    max_kv_tokens: int = 0  # tokens of one sequence that the KV pool holds; 0 = not known
    parameters: Mapping[str, str] = NO_PARAMETERS  # parameters of the model's config.pbtxt
    adapters: Mapping[str, str] = NO_PARAMETERS  # name -> PEFT directory: those that requests may name


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
    kind = read_request_type(extra.get("request_type"))
    others = {name: value for name, value in extra.items() if name not in OURS and not _is_tritons(name)}
    return Parameters(timeout / 1e6 if timeout else None, _namespace(extra), _caller(extra), kind, others)


def _caller(extra: dict[str, Any]) -> Caller:
    """Read the trace context. A value that is not a string counts as absent, because a broken trace must not fail a request."""
    parent, state = extra.get("traceparent"), extra.get("tracestate")
    if not isinstance(parent, str):
        return NO_CALLER
    return Caller(parent, state if isinstance(state, str) else "")


def _is_tritons(name: str) -> bool:
    return name in TRITONS_OWN or name.startswith(("triton_", "sequence_", "nv_"))


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


def read_parameters(request: RequestHeader, tensors: ModelTensors) -> Parameters:
    """Parse the parameters of a Triton request, which may hold any bytes. Raises InvalidRequest, and Unsupported for a phase
    that a model with these tensors cannot run alone.
    """
    try:
        text = request.parameters()
    except UnicodeDecodeError:
        raise InvalidRequest("the request's parameters are not valid UTF-8; encode text as UTF-8") from None
    parameters = parse_parameters(request.timeout(), text)
    check_has_phases(parameters.request_type, tensors)
    return parameters


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


def required(batch: Batch, name: str, row: int) -> Any:
    """The row's scalar. Raises InvalidRequest when it is absent, which Triton does not find out by itself."""
    value = batch.scalar(name, row)
    if value is None:
        raise InvalidRequest(f"A value is required for {name}")
    return value
