"""Numbers that no field should hold, in every field of every wire that a server takes, in the order of the tables of fields.

JSON        the fields of model `everbatch`, of vLLM's sampling parameters and of the endpoint's routes, and fields deep in them
queries     the parameters of the endpoint's routes that have no body, and names in their paths
tensors     every input of every front, over HTTP (any JSON value) and gRPC (the extremes of its type)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from urllib.parse import quote

from backend.serving.wires.roles import MODELS
from tests.hostile import gateway_cases, http_cases, json_cases, served, values
from tests.hostile.case import Case, GrpcCall
from tests.hostile.grpc_messages import base, packed, replace_input
from tests.hostile.numbers import VALUES, as_json

KIND = "numbers"
_TEXTS = {name: as_json(value) for name, value in VALUES.items()}
_USER = '{"role": "user", "content": "a"}'
_CALL = '{"type": "tool_use", "id": "a", "name": "f", "input": {"a": N}}'
_SCHEMA = '{"type": "object", "properties": {"a": {"const": N}}}'
DEEP = (  # route, field, its value with N for the number
    ("/v1/messages", "thinking", '{"type": "enabled", "budget_tokens": N}'),
    ("/v1/messages", "tools", f'[{{"name": "f", "input_schema": {_SCHEMA}}}]'),
    ("/v1/messages", "tools", '[{"name": "f", "input_schema": {"type": N}}]'),
    ("/v1/messages", "output_config", f'{{"format": {{"type": "json_schema", "schema": {_SCHEMA}}}}}'),
    ("/v1/messages", "chat_template_kwargs", '{"a": N}'),
    (
        "/v1/messages",
        "messages",
        f'[{_USER}, {{"role": "assistant", "content": [{_CALL}]}}, {{"role": "user", "content": '
        '[{"type": "tool_result", "tool_use_id": "a", "content": "b"}]}]',
    ),
    ("/v1/messages", "messages", '[{"role": "user", "content": [{"type": "text", "text": "a", "citations": [N]}]}]'),
    ("/v1/messages/count_tokens", "chat_template_kwargs", '{"a": [N]}'),
    ("/v1/messages/count_tokens", "messages", f'[{_USER}, {{"role": "assistant", "content": [{_CALL}]}}, {_USER}]'),
    ("/v1/chat/completions", "chat_template_kwargs", '{"a": N}'),
    ("/v1/chat/completions", "logit_bias", '{"5": N}'),
    (
        "/v1/chat/completions",
        "response_format",
        '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": N}}}',
    ),
    ("/v1/chat/interactive", "prompt", '[{"role": "user", "content": N}]'),
    ("/v1/conversations", "metadata", '{"a": N}'),
    ("/api/chat", "options", '{"num_predict": 3, "temperature": N}'),
    ("/api/generate", "options", '{"num_predict": N}'),
    ("/api/generate", "format", '{"type": "object", "properties": {"a": {"const": N}}}'),
    ("/infill", "input_extra", '[{"text": "a", "time": [N]}]'),
)
QUERIES = (  # method, path with N for the number
    ("GET", "/everbatch/live?hz=-N"),  # a rate that is allowed would be answered without an end
    ("GET", "/v1/loads?model=N"),
    ("GET", "/v1/admin/models?a=N"),
    ("POST", "/v1/admin/models/N/load"),
    ("GET", "/v1/models/N"),
    ("GET", "/slots?model=N"),
    ("GET", "/props?model=N"),
    ("GET", "/v1/responses/N/input_items?limit=N"),
    ("GET", "/v1/conversations/interactive_N/items?limit=N&order=N&after=N"),
)
_FLOATS = (math.inf, -math.inf, math.nan, 1e-45, 0.0, -1.0)


def cases() -> list[Case]:
    """All of them, in a fixed order."""
    return [*_json_cases(), *_deep_cases(), *_queries(), *_http_tensors(), *_grpc_tensors()]


def _json_cases() -> Iterator[Case]:
    for what, names in json_cases.NAMES.items():
        for field in names:
            for name, text in _TEXTS.items():
                data = json_cases.object_text(json_cases.SERVED[what] | {field: text})
                label = f"{what}: {field} = {name}"
                if what in served.WITH_JSON:
                    yield _in_tensor(what, data, label)
                else:
                    yield Case(KIND, label, served.GATEWAY, gateway_cases.exchange(data, what))


def _deep_cases() -> Iterator[Case]:
    for what, field, value in DEEP:
        for name, text in _TEXTS.items():
            data = json_cases.object_text(json_cases.SERVED[what] | {field: value.replace("N", text)})
            yield Case(
                KIND, f"{what}: {field} = {value}, N = {name}", served.GATEWAY, gateway_cases.exchange(data, what)
            )


def _queries() -> Iterator[Case]:
    for method, route in QUERIES:
        for name, text in _TEXTS.items():
            path = route.replace("N", quote(text[:6000], safe=""))
            yield Case(KIND, f"{route} = {name}", served.GATEWAY, gateway_cases.exchange(b"", path, "", method))


def _in_tensor(model: str, data: bytes, label: str) -> Case:
    """JSON that travels as the text of a tensor."""
    fields = http_cases.base(model) | {served.WITH_JSON[model]: json.dumps(data.decode())}
    return http_cases.post(KIND, label, model, http_cases.body(fields))


def _http_tensors() -> Iterator[Case]:
    for model, tensors in MODELS.items():
        for spec in tensors.inputs:
            for name, text in _TEXTS.items():
                data = http_cases.body(http_cases.base(model) | {spec.name: text})
                yield http_cases.post(KIND, f"{model}: {spec.name} = {name}", model, data)


def _grpc_tensors() -> Iterator[Case]:
    for model, tensors in MODELS.items():
        method = "ModelInfer" if served.is_unary(model) else "ModelStreamInfer"
        for spec in tensors.inputs:
            for raw in _extremes(spec.dtype):
                message = base(model)
                shape = [*([1] if tensors.batched else []), *(1 for _ in spec.dims)]
                replace_input(message, spec, shape, raw)
                call = GrpcCall(method, (message.SerializeToString(),))
                yield Case(KIND, f"{model}: {spec.name} = {raw.hex()}", model, call)


def _extremes(dtype: str) -> Iterator[bytes]:
    if dtype == "STRING":
        yield from (packed(dtype, text) for text in (b"", b"1e308", b"NaN", b"1" * 5000))
    elif dtype.startswith("FP"):
        widest = 65_504.0 if dtype == "FP16" else 3.4e38
        yield from (packed(dtype, value) for value in (*_FLOATS, widest, -widest))
    else:
        bits = 8 * values.WIDTH[dtype]
        numbers = {values.wrapped(value, dtype) for value in (0, -1, 1, 1 << (bits - 1), (1 << (bits - 1)) - 1)}
        yield from (packed(dtype, value) for value in sorted(numbers))
