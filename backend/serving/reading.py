"""Arrays of one Triton request -> checked Python values, row by row.

Triton 24.10 compares types and shapes with the config, but counts required inputs instead of naming them, wraps
integers that HTTP clients send out of range, and passes any bytes as a string: nothing here is taken for granted.
Every value that leaves this module owns its memory (an input's array lives in shared memory that Triton takes back).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from backend.api import InvalidRequest, Unsupported
from backend.serving.string_tensors import MAX_STRINGS
from backend.serving.tensors import NUMPY_TYPES, Input, ModelTensors

MAX_BYTES = 64 << 20  # of all inputs of one request; the widest that limits elsewhere allow are well below

Value = int | float | bool | str


class NamedTensor(Protocol):
    def name(self) -> str: ...

    def as_numpy(self) -> np.ndarray: ...


class Batch:
    """The inputs of one Triton request: `num_rows` rows of named values, one where the model is not batched. Reading raises
    InvalidRequest naming the input.
    """

    def __init__(self, specs: Mapping[str, Input], arrays: Mapping[str, np.ndarray], num_rows: int, num_bytes: int):
        self._specs = specs
        self._arrays = arrays
        self.num_rows = num_rows
        self.num_bytes = num_bytes  # of all inputs

    @classmethod
    def read(cls, model: ModelTensors, tensors: Iterable[NamedTensor], max_rows: int) -> Batch:
        """Check types, shapes and sizes of all inputs. Raises InvalidRequest for the first that is wrong."""
        specs = model.by_name()
        arrays: dict[str, np.ndarray] = {}
        num_rows = num_bytes = 0
        for tensor in tensors:
            name, array = tensor.name(), tensor.as_numpy()
            if name not in specs:
                raise InvalidRequest(f"Unexpected input {name[:64]!r}; leave it out")
            if not model.batched:
                array = array[np.newaxis]
            _check_array(specs[name], array, model.batched)
            num_rows = num_rows if arrays else array.shape[0]
            if array.shape[0] != num_rows:
                raise InvalidRequest(
                    f"Invalid format for {name}: {array.shape[0]} rows where other inputs have {num_rows}"
                )
            arrays[name] = array
            num_bytes += _num_bytes(name, array)
        if num_bytes > MAX_BYTES:
            raise InvalidRequest(f"the request's inputs hold {num_bytes} bytes, the limit is {MAX_BYTES}; split it")
        if num_rows > max_rows:
            raise InvalidRequest(f"the request holds {num_rows} rows, the limit is {max_rows}; split it")
        if num_rows == 0:
            raise InvalidRequest("the request holds no rows; every input needs a batch dimension of at least 1")
        return cls(specs, arrays, num_rows, num_bytes)

    def keep(self) -> None:
        """Take copies, so that the request may be read after Triton has taken its inputs back."""
        self._arrays = {name: np.array(array) for name, array in self._arrays.items()}

    def has(self, name: str) -> bool:
        """Whether the input is there and holds anything."""
        array = self._arrays.get(name)
        return array is not None and array.size > 0

    def vector(self, name: str, row: int) -> np.ndarray | None:
        """The row's own elements in one dimension, a copy; None when the input is absent. Floats are finite."""
        array = self._arrays.get(name)
        if array is None:
            return None
        values = np.array(array[row]).reshape(-1)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise InvalidRequest(f"{name} holds a value that is not a finite number; send finite numbers")
        return values

    def matrix(self, name: str, row: int) -> np.ndarray | None:
        """The row in its own two dimensions, a copy; None when the input is absent or holds nothing."""
        return np.array(self._arrays[name][row]) if self.has(name) else None

    def scalar(self, name: str, row: int) -> Any:
        """One number, bool or string; None when the input is absent or holds nothing."""
        values = self.vector(name, row)
        if values is None or values.size == 0:
            return None
        if values.size != 1:
            raise InvalidRequest(f"Invalid format for {name}: {values.size} values in a row, one is expected")
        return decode_text(name, values[0]) if values.dtype.kind == "O" else values[0].item()

    def check_texts(self, name: str, row: int, max_count: int, max_bytes: int, key: str = "") -> None:
        """Raise InvalidRequest when the row of a STRING input holds more than that; nothing is decoded for it. `key`: the
        configuration key of the limit on bytes.
        """
        array = self._arrays.get(name)
        if array is None:
            return
        values = array[row].reshape(-1)
        if values.size > max_count:
            raise InvalidRequest(f"{name} holds {values.size} entries, the limit is {max_count}; send fewer")
        num_bytes = sum(map(len, values))
        if num_bytes > max_bytes:
            where = f" ({key})" if key else ""
            raise InvalidRequest(f"{name} has {num_bytes} bytes, the limit is {max_bytes}{where}; shorten it")

    def texts(self, name: str, row: int) -> list[str]:
        """A list of strings; empty when the input is absent."""
        values = self.vector(name, row)
        return [] if values is None else [decode_text(name, value) for value in values]

    def fields(self, section: str, row: int) -> dict[str, Any]:
        """All scalars whose table target is `section.FIELD`, by field name; absent ones are left out."""
        found: dict[str, Any] = {}
        for name, spec in self._specs.items():
            owner, _, field = spec.target.partition(".")
            if owner == section and field not in found and (value := self.scalar(name, row)) is not None:
                found[field] = value
        return found

    def refuse_what_is_not_built(self) -> None:
        """Raise Unsupported when an input of a feature that this version lacks holds more than its neutral value."""
        for name, array in self._arrays.items():
            spec = self._specs[name]
            if spec.target == "refused" and not _is_neutral(array, spec.neutral):
                remedy = f" or send {str(spec.neutral[0]).lower()}" if spec.neutral and spec.neutral[0] != "" else ""
                raise Unsupported(
                    f"{name} asks for {spec.feature}, which this version does not have; leave it out{remedy}"
                )


def _check_array(spec: Input, array: np.ndarray, batched: bool) -> None:
    if array.dtype != np.dtype(NUMPY_TYPES[spec.dtype]):
        raise InvalidRequest(f"Invalid format for {spec.name}: the type is {array.dtype}, {spec.dtype} is expected")
    shape = array.shape[1:]
    if len(shape) != len(spec.dims) or any(want not in (-1, got) for want, got in zip(spec.dims, shape)):
        expected = ", ".join((["rows"] if batched else []) + ["any" if size == -1 else str(size) for size in spec.dims])
        got = list(array.shape if batched else shape)
        raise InvalidRequest(f"Invalid format for {spec.name}: the shape is {got}, [{expected}] is expected")


def _num_bytes(name: str, array: np.ndarray) -> int:
    """Raises InvalidRequest for more strings than were read (string_tensors.py)."""
    if array.dtype.kind != "O":
        return array.nbytes
    if array.size > MAX_STRINGS:
        raise InvalidRequest(f"{name} holds {array.size} strings, the limit is {MAX_STRINGS}; send fewer")
    return sum(map(len, array.reshape(-1)))


def _is_neutral(array: np.ndarray, neutral: tuple[Value, ...]) -> bool:
    if array.size > 1024:  # a neutral value comes once per row; a long tensor is a use of the feature
        return False
    wanted = [value.encode() if isinstance(value, str) else value for value in neutral]
    return all(value in wanted for value in array.reshape(-1).tolist())


def decode_text(name: str, value: Any) -> str:
    """One element of a STRING tensor as text. Raises InvalidRequest when it is not UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8 at byte {error.start}; encode text as UTF-8") from None
