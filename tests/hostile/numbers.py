"""Numbers that no field should hold, for every field of every way in. Fields are found in their tables, so that a new one is
swept, too.

A `Probe` sends one value in one field. It returns an empty text for an answer and for an error that is the client's fault, and a
sentence for anything else. `sweep` sends the probes of one way in, and asks a canary after each.

What goes through a server (JSON and tensors over HTTP, the OpenAI endpoint) is in served_numbers.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect
from msgspec import Struct

from backend.api.config.schema import EngineConfig
from backend.api.guide import Guide, GuideType, Thinking
from backend.api.images import ImageInput
from backend.api.lora import LoraConfig
from backend.api.outputs import AdditionalOutput, OutputConfig
from backend.api.request import Request, RetentionConfig, SessionConfig, SessionId, TokenRangeRetention
from backend.api.sampling import SamplingConfig
from backend.api.tensor import TensorData
from compat import trtllm

VALUES: dict[str, Any] = {
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
    "1e308": 1e308,
    "-1e308": -1e308,
    "1e-320": 1e-320,
    "10**400": 10**400,
    "-10**400": -(10**400),
    "10**5000": 10**5000,  # more digits than Python turns into a text
    "2**31": 2**31,
    "2**63": 2**63,
    "2**64": 2**64,
    "-1": -1,
    "0": 0,
    "true": True,
    "'1'": "1",
    "none": None,
    "[]": [],
    "{}": {},
    "[inf]": [math.inf],
    "[-1]": [-1],
    "[2**64]": [2**64],
    "[[]]": [[]],
    "a long list": [1] * 20_000,
}
_SAMPLES: dict[type[Struct], Struct] = {  # a valid value of each nested struct, where a request has none
    SamplingConfig: SamplingConfig(),
    OutputConfig: OutputConfig(),
    SessionConfig: SessionConfig(SessionId(1 << 50), start=True, end=True),
    RetentionConfig: RetentionConfig((TokenRangeRetention(0, 4),)),
    TokenRangeRetention: TokenRangeRetention(0, 4),
    AdditionalOutput: AdditionalOutput("logits"),
    TensorData: TensorData("float32", (1, 4), bytes(16)),
    LoraConfig: LoraConfig(1),
    Guide: Guide(GuideType.REGEX, "a*"),
    Thinking: Thinking((5,)),
    ImageInput: ImageInput(5, 1, "00" * 32, {}),
}


MAX_ERROR = 600  # characters; more is a value that was repeated


class Probe(NamedTuple):
    name: str  # the field and the value
    send: Callable[[], str]


def field_paths(kind: type[Struct]) -> Iterator[tuple[str, ...]]:
    """The path of every field of a struct, those of nested structs and of structs in lists included."""
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        yield (field.name,)
        for inner in _structs_of(field.type):
            yield from ((field.name, *path) for path in field_paths(inner))


def _structs_of(found: msgspec.inspect.Type) -> Iterator[type[Struct]]:
    if isinstance(found, msgspec.inspect.StructType):
        yield found.cls
    elif isinstance(found, msgspec.inspect.UnionType):
        for each in found.types:
            yield from _structs_of(each)
    elif isinstance(found, (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)):
        yield from _structs_of(found.item_type)


def replaced(struct: Struct, path: tuple[str, ...], value: Any) -> Struct:
    """The struct with one field set, whatever its type. Nested structs that are not there are made; a list gets one of them."""
    name, *rest = path
    if rest:
        (inner,) = _structs_of(next(f.type for f in msgspec.inspect.type_info(type(struct)).fields if f.name == name))  # type: ignore[attr-defined]
        present = getattr(struct, name)
        is_list = isinstance(present, (list, tuple))
        within = replaced(present if isinstance(present, inner) else _SAMPLES[inner], tuple(rest), value)
        value = (within,) if is_list else within
    return msgspec.structs.replace(struct, **{name: value})


def requests() -> Iterator[tuple[str, Request]]:
    """A request that is served but for one field of it, for each field and value."""
    base = Request([5, 6, 7], 3)
    for path in field_paths(Request):
        for name, value in VALUES.items():
            yield f"{'.'.join(path)} = {name}", replaced(base, path, value)  # type: ignore[misc]


def settings() -> Iterator[tuple[str, str]]:
    """`section.key=value` for each key of the configuration, and each value."""
    for path in field_paths(EngineConfig):
        if len(path) == 2:
            for name, value in VALUES.items():
                yield f"{'.'.join(path)} = {name}", f"{'.'.join(path)}={as_json(value)}"


def records() -> Iterator[tuple[str, Callable[[], trtllm.Request]]]:
    """A request of TensorRT-LLM's bindings that is served but for one field of it, or of a record in it."""
    prompt = {"input_token_ids": [5, 6, 7], "max_tokens": 3}
    for name, value in VALUES.items():
        for field in trtllm.Request._fields:
            yield f"Request.{field} = {name}", partial(trtllm.Request, **{**prompt, field: value})
        for argument, (record, given) in _RECORDS.items():
            for field in record._fields.values():
                inner = partial(record, **{**given, field.alias: value})
                make = lambda argument=argument, inner=inner: trtllm.Request(**prompt, **{argument: inner()})
                yield f"{record.__name__}.{field.name} = {name}", make


_RECORDS: dict[
    str, tuple[Any, dict[str, Any]]
] = {  # argument of Request -> record, and what it needs besides the field
    "sampling_config": (trtllm.SamplingConfig, {}),
    "output_config": (trtllm.OutputConfig, {}),
    "lookahead_config": (
        trtllm.LookaheadDecodingConfig,
        {"max_window_size": 2, "max_ngram_size": 2, "max_verification_set_size": 2},
    ),
    "prompt_tuning_config": (trtllm.PromptTuningConfig, {}),
    "lora_config": (trtllm.LoraConfig, {"task_id": 1}),
    "kv_cache_retention_config": (
        trtllm.KvCacheRetentionConfig,
        {"token_range_retention_configs": [], "decode_retention_priority": 35},
    ),
    "external_draft_tokens_config": (trtllm.ExternalDraftTokensConfig, {"tokens": [1]}),
    "guided_decoding_params": (
        trtllm.GuidedDecodingParams,
        {"guide_type": trtllm.GuidedDecodingParams.GuideType.JSON},
    ),
}


def as_json(value: Any) -> str:
    """The value as a JSON text, as a careless client writes it: infinities and NaN in JavaScript's words."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(as_json, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, int) and value.bit_length() > 10_000:  # more digits than `str` writes
        return "1" + "0" * 5000
    return str(value)


def sweep(probes: Iterable[Probe], canary: Callable[[], str], every: int = 1) -> list[str]:
    """Send each `every`th probe, and ask the canary after it. Returns what was found, in sentences; at most 20."""
    found: list[str] = []
    for index, probe in enumerate(probes):
        if index % every:
            continue
        problem = probe.send()
        if problem:
            found.append(f"{probe.name}: {problem}")
        after = canary()
        if after:
            found.append(f"after {probe.name}: {after}")
        if len(found) >= 20:
            break
    return found
