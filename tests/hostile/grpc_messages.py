"""gRPC requests that are served, and the pieces that they are made of."""

from __future__ import annotations

import random
import struct
from typing import Any

from tritonclient.grpc import service_pb2

from backend.serving.tensors import Input
from backend.serving.wires.roles import MODELS
from tests.hostile import served, values
from tests.hostile.case import Case, GrpcCall

_STREAM, _UNARY = "ModelStreamInfer", "ModelInfer"


def packed(dtype: str, *items: int | float | bytes) -> bytes:
    """Raw contents of a tensor of these elements."""
    if dtype == "STRING":
        return b"".join(struct.pack("<I", len(item)) + item for item in items)
    return struct.pack(f"<{len(items)}{values.PACK[dtype][1:]}", *items)


def add_input(message: Any, name: str, dtype: str, shape: list[int], raw: bytes) -> None:
    tensor = message.inputs.add()
    tensor.name, tensor.datatype = name, "BYTES" if dtype == "STRING" else dtype
    tensor.shape.extend(shape)
    message.raw_input_contents.append(raw)


def base(model: str, rows: int = 1, max_tokens: int = 3) -> Any:
    """A request that is served: `rows` rows, of `max_tokens` tokens each."""
    message = service_pb2.ModelInferRequest(model_name=model)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for tensor in served.good(model, max_tokens):
        put(message, model, tensor, rows)
    return message


def put(message: Any, model: str, tensor: served.Tensor, rows: int = 1) -> None:
    """Set one input of `rows` equal rows."""
    spec = MODELS[model].by_name()[tensor.name]
    items = [item.encode() if isinstance(item, str) else item for item in tensor.values]
    batch = [rows] if MODELS[model].batched else []
    replace_input(message, spec, [*batch, *tensor.dims], packed(spec.dtype, *items * rows))


def streamed(model: str, max_tokens: int) -> Any:
    """A request that is answered token by token, where the front does that."""
    message = base(model)
    for tensor in served.streamed(model, max_tokens):
        put(message, model, tensor)
    return message


def case(rng: random.Random, kind: str, name: str, model: str, *messages: Any, **more: Any) -> Case:
    """A case of one call; one in ten goes to ModelInfer, which a decoupled model refuses, and half of those to unary models."""
    share = 0.5 if served.is_unary(model) else 0.1
    method = _UNARY if rng.random() < share and len(messages) == 1 else _STREAM
    data = tuple(message if isinstance(message, bytes) else message.SerializeToString() for message in messages)
    fatal = more.pop("string_length", False)
    call = GrpcCall(method, data, keep_open=rng.random() < 0.3, **more)
    return Case(kind, f"{method}: {name}", model, call, string_length=fatal)


def replace_input(message: Any, spec: Input, shape: list[int], raw: bytes, dtype: str | None = None) -> None:
    """Set one input, in its place if it is there already."""
    for index, tensor in enumerate(message.inputs):
        if tensor.name == spec.name:
            del tensor.shape[:]
            tensor.shape.extend(shape)
            tensor.datatype = tensor.datatype if dtype is None else dtype
            message.raw_input_contents[index] = raw
            return
    add_input(message, spec.name, spec.dtype if dtype is None else dtype, shape, raw)


def any_spec(rng: random.Random, model: str) -> Input:
    """Any input; the required ones often."""
    specs = MODELS[model].inputs
    return rng.choice(specs[:4] if rng.random() < 0.3 else specs)


def full_shape(rng: random.Random, model: str, spec: Input) -> list[int]:
    rows = [1] if MODELS[model].batched else []
    return [*rows, *(rng.choice((1, 2, 3, 7)) if size == -1 else size for size in spec.dims)]


def count_of(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
