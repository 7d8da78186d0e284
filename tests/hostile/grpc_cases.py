"""Malformed ModelStreamInfer and ModelInfer calls."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from backend.serving.wires.roles import MODELS
from tests.hostile import json_cases, served, values
from tests.hostile.case import Case
from tests.hostile.grpc_messages import (
    add_input,
    any_spec,
    base,
    case,
    count_of,
    full_shape,
    packed,
    put,
    replace_input,
    streamed,
)

FATAL = "grpc-classification"  # a class of requests that ends tritonserver by itself: sent only when asked for
_MARK = "IDMARKID"  # replaced by bytes that are no UTF-8 once the message is serialised


def bad_value(rng: random.Random, model: str) -> Case:
    """One to three inputs of the right type and rank, with any values."""
    message, names = base(model), []
    for _ in range(rng.randrange(1, 4)):
        spec = any_spec(rng, model)
        shape = full_shape(rng, model, spec)
        replace_input(message, spec, shape, b"".join(values.element(rng, spec.dtype) for _ in range(count_of(shape))))
        names.append(spec.name)
    return case(rng, "grpc-values", f"odd values in {', '.join(names)}", model, message)


DTYPES = (*values.PACK, "BYTES", "BF16", "", "NONE", "\0", "X" * 300)


def bad_dtype(rng: random.Random, model: str) -> Case:
    spec, dtype = any_spec(rng, model), rng.choice(DTYPES)
    shape = full_shape(rng, model, spec)
    raw = b"\1\0\0\0a" * count_of(shape) if dtype == "BYTES" else bytes(values.WIDTH.get(dtype, 4) * count_of(shape))
    message = base(model)
    replace_input(message, spec, shape, raw, dtype)
    length_is_wrong = spec.dtype == "STRING" and dtype not in DTYPES[: len(values.PACK)]
    name = f"{spec.name} as {dtype[:10]}"
    return case(rng, "grpc-dtypes", name, model, message, string_length=length_is_wrong and dtype != "BYTES")


SHAPES = (
    [],
    [1],
    [1, 1, 1],
    [0, 1],
    [1, 0],
    [2, 1],
    [-1, 1],
    [1, -1],
    [2**62, 4],
    [2**63 - 1],
    [2**32, 2**32],
    [1] * 200,
    [1, 2**40],
)


def bad_shape(rng: random.Random, model: str) -> Case:
    """Wrong ranks, zero, negative and overflowing sizes, other numbers of rows."""
    spec, shape = any_spec(rng, model), list(rng.choice(SHAPES))
    count = count_of(shape)
    count = count if 0 <= count <= 64 else rng.randrange(4)
    message = base(model)
    replace_input(message, spec, shape, b"".join(values.element(rng, spec.dtype) for _ in range(count)))
    wrong = spec.dtype == "STRING" and count != count_of(shape)
    return case(rng, "grpc-shapes", f"{spec.name} of shape {str(shape)[:30]}", model, message, string_length=wrong)


def bad_length(rng: random.Random, model: str) -> Case:
    """Contents longer or shorter than the shape says; of every type but STRING."""
    specs = [spec for spec in MODELS[model].inputs if spec.dtype != "STRING"]
    spec = rng.choice(specs)
    shape = full_shape(rng, model, spec)
    right = count_of(shape) * values.WIDTH[spec.dtype]
    message = base(model)
    replace_input(message, spec, shape, rng.randbytes(max(0, right + rng.choice((-right, -1, 1, 3, 1000)))))
    return case(rng, "grpc-lengths", f"{spec.name} of a wrong length", model, message)


def string_length(rng: random.Random, model: str) -> Case:
    """STRING tensors whose lengths contradict the shape or each other."""
    spec = rng.choice(served.texts_of(model))
    raw = rng.choice(
        (
            *(
                b"",
                b"\1",
                b"\5\0\0\0abc",
                b"\xff\xff\xff\xffabc",
                b"\xff\xff\xff\x7f",
                b"\0\0\0\0\0\0\0\0",
                b"\1\0\0\0a\1\0\0\0b",
            ),
            *(b"\0\0\0\0a", b"\1\0\0", rng.randbytes(rng.randrange(40)), struct.pack("<I", 2**31) + b"a"),
        )
    )
    message = base(model)
    replace_input(message, spec, full_shape(rng, model, spec), raw)
    return case(rng, "grpc-string-lengths", f"{spec.name} holds {raw[:8]!r}", model, message, string_length=True)


def bad_inputs(rng: random.Random, model: str) -> Case:
    """Inputs that are missing, unknown, given twice, or in two forms at once."""
    message = base(model)
    way = rng.randrange(6)
    if way == 0:
        index = rng.randrange(len(message.inputs))
        del message.inputs[index], message.raw_input_contents[index]
        if rng.random() < 0.5:  # Triton only counts: an optional input makes up for it
            given = {tensor.name for tensor in message.inputs}
            spec = rng.choice([spec for spec in MODELS[model].inputs if spec.name not in given])
            shape = full_shape(rng, model, spec)
            add_input(message, spec.name, spec.dtype, shape, values.element(rng, spec.dtype))
    elif way == 1:
        add_input(message, values.text(rng).encode("utf-8", "replace").decode(), "INT32", [1, 1], bytes(4))
    elif way == 2:
        add_input(
            message,
            message.inputs[0].name,
            message.inputs[0].datatype,
            list(message.inputs[0].shape),
            message.raw_input_contents[0],
        )
    elif way == 3:
        message.raw_input_contents.append(b"more contents than inputs")
    elif way == 4:
        del message.raw_input_contents[:]
        message.inputs[-1].contents.int_contents.extend([3] * rng.randrange(3))
        message.inputs[-1].contents.bytes_contents.append(rng.randbytes(4))
    else:
        message.inputs[0].contents.fp32_contents.append(1.0)
    return case(
        rng,
        "grpc-inputs",
        ("missing", "unknown", "twice", "too many contents", "typed", "both forms")[way],
        model,
        message,
    )


def rows(rng: random.Random, model: str) -> Case:
    """Several rows, some of them refused while the others run."""
    count = rng.choice((2, 2, 3, 8, 64, 65))
    message = base(model, count, rng.choice((2, 10, 30)))
    spec = rng.choice(
        [
            spec
            for spec in MODELS[model].inputs
            if spec.dims == (1,) and spec.target.startswith(("sampling", "session", "request"))
        ]
    )
    if spec.dtype == "STRING":
        raw = b"".join(values.element(rng, "STRING") for _ in range(count))
    else:
        odd = {rng.randrange(count)}
        raw = b"".join(values.element(rng, spec.dtype) if n in odd else packed(spec.dtype, 1) for n in range(count))
    replace_input(message, spec, [count, 1], raw)
    flag = served.stream_flag(model)
    if flag is not None and rng.random() < 0.5:
        put(message, model, served.Tensor(flag, (1,), [True]), count)
    return case(rng, "grpc-rows", f"{count} rows, one with an odd {spec.name}", model, message)


def cancelled(rng: random.Random, model: str) -> Case:
    """A stream that is cancelled at once or midway."""
    message = streamed(model, rng.choice((30, 300)))
    more = [message] * rng.choice((0, 0, 3))
    return case(rng, "grpc-cancelled", "cancelled", model, message, *more, leave_after=rng.choice((0, 1, 2, 9)))


def half_closed(rng: random.Random, model: str) -> Case:
    """Streams of no request, or of many requests good and bad."""
    other = sessions if model in served.WITH_SESSIONS else bad_shape
    messages = [
        (bad_value if rng.random() < 0.5 else other)(rng, model).call.messages[0] for _ in range(rng.randrange(5))
    ]
    found = case(rng, "grpc-half-closed", f"{len(messages)} requests on a stream", model, *messages)
    return found if messages else replace(found, incomplete=True)  # Triton never ends a stream of no request


NAMES = (
    *(
        "timeout",
        "cache_salt",
        "request_type",
        "priority",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "binary_data_size",
    ),
    *(
        "triton_enable_empty_final_response",
        "triton_final_response",
        "shared_memory_region",
        "namespace",
        "",
        "\0",
        "x" * 3000,
        "a",
    ),
)


def parameters(rng: random.Random, model: str) -> Case:
    """Parameters of every type under every name that means something."""
    message = base(model)
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(NAMES)
        value = message.parameters[name]
        way = rng.randrange(6)
        if way == 0:
            value.bool_param = rng.random() < 0.5
        elif way == 1:
            value.int64_param = rng.choice((0, -1, 1, 2**63 - 1, -(2**63)))
        elif way == 2:
            value.string_param = values.text(rng)
        elif way == 3:
            value.double_param = rng.choice(values.FLOATS)
        elif way == 4:
            value.uint64_param = rng.choice((0, 1, 2**64 - 1))  # way 5: no value at all
    if rng.random() < 0.3:
        message.inputs[0].parameters[rng.choice(NAMES)].int64_param = rng.choice((-1, 0, 2**40))
    if rng.random() < 0.3:
        output = message.outputs.add()
        output.name = rng.choice(("text_output", "output_ids", "unknown", ""))
        output.parameters[rng.choice(("shared_memory_region", "binary_data"))].int64_param = rng.choice((-1, 3, 2**31))
    name = f"parameters {', '.join(key[:20] for key in message.parameters)}"
    return case(rng, "grpc-parameters", name, model, message, tells_ends=False)


def classification(rng: random.Random, model: str) -> Case:
    """An output asked for as classes: fatal to tritonserver 24.10 where the output holds text."""
    message = base(model)
    output = message.outputs.add()
    output.name = MODELS[model].outputs[0].name
    output.parameters["classification"].int64_param = rng.choice((-1, 1, 3, 2**31))
    return case(rng, FATAL, "an output as classes", model, message)


def sessions(rng: random.Random, model: str) -> Case:
    """Odd flags of a few sessions that meet each other and those over HTTP."""
    message = base(model)
    _set(message, model, "CORRID", rng.choice((0, 1, 2, 3, 4, 2**64 - 1)))
    for name in rng.sample(("START", "END", "STOP", "step", "session_len"), rng.randrange(5)):
        if name in MODELS[model].by_name():
            _set(message, model, name, rng.choice((0, 1, 1, -1, 2, 30, 2**31 - 1, -(2**31))))
    return case(rng, "grpc-sessions", "odd flags of a session", model, message)


def _set(message: Any, model: str, name: str, value: int) -> None:
    dtype = MODELS[model].by_name()[name].dtype
    put(message, model, served.Tensor(name, (1,), [values.wrapped(value, dtype)]))


def twins(rng: random.Random, model: str) -> Case:
    """Requests of one id, or turns of one session, all at the same moment on one stream; some stop the others."""
    session, identity = rng.randrange(5, 8), rng.choice(("twin", "twin", "", "\u00e9" * 20))
    messages = []
    for _ in range(rng.randrange(2, 6)):
        message = streamed(model, rng.choice((2, 40, 200)))
        message.id = identity
        if model in served.WITH_SESSIONS and rng.random() < 0.7:
            _set(message, model, "CORRID", session)
            for name in ("START", "END"):
                _set(message, model, name, rng.randrange(2))
        if rng.random() < 0.2 and model in served.WITH_STOP:
            put(message, model, served.Tensor("stop", (1,), [True]))
        messages.append(message)
    leave_after = rng.choice((None, None, 0, 1, 5))
    return case(rng, "grpc-twins", f"{len(messages)} twins", model, *messages, leave_after=leave_after)


def odd_json(rng: random.Random, model: str) -> Case:
    """A JSON object in a tensor that is none, or holds odd values, keys or depths; sometimes cancelled midway."""
    message, name = base(model), served.WITH_JSON[model]
    data = json_cases.request_text(rng, model)
    put_raw = packed("STRING", data)
    replace_input(message, MODELS[model].by_name()[name], [1], put_raw)
    leave_after = rng.choice((None,) * 8 + (0, 1))
    return case(rng, "grpc-json", f"{name} {data[:24]!r}", model, message, leave_after=leave_after)


def stops(rng: random.Random, model: str) -> Case:
    """Stop requests for ids that nobody has, or no id."""
    message = base(model)
    message.id = rng.choice(("", "nobody", "1", "\ufeff", "x" * 5000))
    shape = [1, 1] if MODELS[model].batched else [1]
    add_input(message, "stop", "BOOL", shape, rng.choice((b"\1", b"\1", b"\2", b"\xff")))
    return case(rng, "grpc-stops", f"stop of {message.id[:10]!r}", model, message)


def names(rng: random.Random, model: str) -> Case:
    """Ids, model names and versions that are huge, unknown, or no UTF-8."""
    message = base(model)
    way = rng.randrange(4)
    if way == 0:
        message.id = rng.choice(("i" * 100_000, "\0", "../../x", "\U0001f600" * 50, "%s%n"))
    elif way == 1:
        message.model_name = rng.choice(("", "nothing", "../tensorrt_llm", "x" * 5000, "ensemble\0", "."))
    elif way == 2:
        message.model_version = rng.choice(
            ("0", "-1", "x", "2", "99999999999999999999", "1.0", "../1", " 1", "1" * 5000)
        )
    else:
        field = rng.choice(("id", "model_name"))
        setattr(message, field, _MARK)
        garbled = message.SerializeToString().replace(_MARK.encode(), b"\xff\xfe\xed\xa0\x80\xc0\x80a")
        # Triton's front ends a stream silently at a message that is no protobuf, which a text that is no UTF-8 makes of it.
        return case(rng, "grpc-names", f"{field} is no UTF-8", model, garbled, tells_ends=False)
    return case(rng, "grpc-names", ("id", "model name", "version")[way], model, message)


def garbled(rng: random.Random, model: str) -> Case:
    """Bytes that are no ModelInferRequest, or were one before some of them were changed."""
    data = bytearray(base(model).SerializeToString())
    if rng.random() < 0.3:
        data = bytearray(rng.randbytes(rng.choice((0, 1, 50, 4000))))
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data) + 1)
        data[place : place + rng.randrange(2)] = rng.randbytes(rng.randrange(2))
    fatal = any(tensor.values and isinstance(tensor.values[0], str) for tensor in served.good(model))
    # A changed length of a text cannot be told from other changes.
    return case(rng, "grpc-bytes", "garbled bytes", model, bytes(data), string_length=fatal, tells_ends=False)


KINDS: dict[str, Callable[[random.Random, str], Case]] = {
    "grpc-values": bad_value,
    "grpc-dtypes": bad_dtype,
    "grpc-shapes": bad_shape,
    "grpc-lengths": bad_length,
    "grpc-string-lengths": string_length,
    "grpc-inputs": bad_inputs,
    "grpc-rows": rows,
    "grpc-cancelled": cancelled,
    "grpc-half-closed": half_closed,
    "grpc-parameters": parameters,
    "grpc-sessions": sessions,
    "grpc-stops": stops,
    "grpc-names": names,
    "grpc-bytes": garbled,
    "grpc-twins": twins,
    "grpc-json": odd_json,
}
# Which fronts a class of requests makes sense for; all where it is not named.
ONLY = {
    "grpc-sessions": served.WITH_SESSIONS,
    "grpc-stops": served.WITH_STOP,
    "grpc-string-lengths": served.WITH_TEXT,
    "grpc-rows": served.WITH_ROWS,
    "grpc-cancelled": served.GENERATING,
    "grpc-twins": served.GENERATING,
    "grpc-json": tuple(served.WITH_JSON),
}
