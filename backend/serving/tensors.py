"""The tensors of a Triton model, as data: `config.pbtxt` is generated from such tables and requests are read by them.

`target` says where a value goes: "sampling.X", "output.X", "session.X" fill the field X of that config; "request" is
read by name by the model's front; "ignored" is accepted and has no meaning here (or none without beams); "refused"
belongs to a feature this version lacks: any element other than `neutral` is answered with UNSUPPORTED. Two rows with
one target are aliases: the first one that is present wins.

Dims are without the batch dimension; -1 is any length. The tables themselves stand beside what reads them, in wires/.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from backend.api.sampling import Wire, on_wire

# Triton's name of each type, and numpy's name of the same type.
NUMPY_TYPES = {
    "BOOL": "bool",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "STRING": "object",
}

ONE = (1,)
ANY = (-1,)

Value = int | float | bool | str


Neutral = tuple[int | float | bool | str, ...]


class Input(NamedTuple):
    """One input tensor of a model."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    target: str
    optional: bool = True
    feature: str = ""  # refused input: the feature that it asks for; ignored input: the reason
    neutral: Neutral = ()  # refused input: values that are accepted because they ask for nothing


class Output(NamedTuple):
    """One output tensor of a model."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    when: str  # the input or the occasion that makes it appear


class ModelTensors(NamedTuple):
    """All tensors of one Triton model."""

    model: str  # its usual name, and the role by which another name is served
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    max_batch_size: int = 64  # the most rows of one request; 0: inputs have no batch dimension, a request is one row
    always: Literal["decoupled", "unary"] | None = None  # the transaction policy that the protocol prescribes
    parameters: tuple[tuple[str, str], ...] = ()  # entries of config.pbtxt that clients read

    @property
    def batched(self) -> bool:
        """True if clients send a batch dimension in front."""
        return self.max_batch_size > 0

    def by_name(self) -> dict[str, Input]:
        return {spec.name: spec for spec in self.inputs}


def refused(feature: str, *rows: tuple[str, str, tuple[int, ...]], neutral: Neutral = ()) -> tuple[Input, ...]:
    """Inputs of a feature that this version lacks."""
    return tuple(Input(name, dtype, dims, "refused", feature=feature, neutral=neutral) for name, dtype, dims in rows)


def ignored(*rows: tuple[str, str, tuple[int, ...]], why: str = "") -> tuple[Input, ...]:
    """Inputs that are accepted and have no meaning here."""
    return tuple(Input(name, dtype, dims, "ignored", feature=why) for name, dtype, dims in rows)


def sampling_inputs(wire: Wire, prefix: str = "", integers: str = "INT32", floats: str = "FP32") -> tuple[Input, ...]:
    """Inputs of the sampling fields that a wire has, in the order of their table.

    `prefix` stands in front of the names on the wire; `integers` and `floats` are its types of plain numbers.
    """
    types = {"INT32": integers, "FP32": floats}
    return tuple(
        Input(prefix + name, types.get(field.dtype, field.dtype), ONE, f"sampling.{field.name}")
        for field, name in on_wire(wire)
        if field.dtype
    )
