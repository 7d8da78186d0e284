"""Reads the arrays of one Triton request as checked Python values, row by row.

Triton 24.10 compares types and shapes with the config. But it only counts the required inputs without looking which they
are, it wraps integers that HTTP clients send out of range, and it passes any bytes as a string. Therefore everything is
checked here again. Every value that leaves this module owns its memory, because Triton takes back the shared memory in which
an input's array lies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.api import InvalidRequest, Unsupported
from backend.serving.protocols import NamedTensor
from backend.serving.string_tensors import MAX_STRINGS
from backend.serving.tensors import NUMPY_TYPES, Input, ModelTensors, Value

DIGEST_BYTES = 16
# All inputs of one request may hold this many bytes. What the other limits allow stays far below it.
MAX_BYTES = 64 << 20


class Batch:
    """The inputs of one Triton request: `num_rows` rows of named values, one row where the model is not batched.

    All methods that read a value raise InvalidRequest, with the name of the input, when it is not as expected.
    """

    def __init__(
        self, specs: Mapping[str, Input], arrays: Mapping[str, NDArray[Any]], num_rows: int, num_bytes: int
    ) -> None:
        self._specs = specs
        self._arrays = arrays
        self.num_rows = num_rows
        self.num_bytes = num_bytes  # the size of all inputs together

    @classmethod
    def read(cls, model: ModelTensors, tensors: Iterable[NamedTensor], max_rows: int) -> Batch:
        """Check types, shapes and sizes of all inputs. Raises InvalidRequest for the first input that is wrong."""
        specs = model.by_name()
        arrays: dict[str, NDArray[Any]] = {}
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

    def digest(self, salt: str) -> bytes:
        """A hash of the whole content, together with `salt`."""
        hashed = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)
        for name, array in sorted(self._arrays.items()):
            hashed.update(f"\0{name} {array.shape}\0".encode())
            for part in array.reshape(-1) if array.dtype.kind == "O" else [array.tobytes()]:
                hashed.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
        return hashed.digest()

    def keep(self) -> None:
        """Copy all arrays, so that the request can still be read when Triton has taken its inputs back."""
        self._arrays = {name: np.array(array) for name, array in self._arrays.items()}

    def has(self, name: str) -> bool:
        """True if the input is present and has at least one element."""
        array = self._arrays.get(name)
        return array is not None and array.size > 0

    def array(self, name: str) -> NDArray[Any] | None:
        """The whole input with its batch dimension, None when it is absent. Until `keep` its memory is Triton's."""
        return self._arrays.get(name)

    def vector(self, name: str, row: int) -> NDArray[Any] | None:
        """A copy of the row's elements in one dimension; None when the input is absent. Floats are checked to be finite."""
        array = self._arrays.get(name)
        if array is None:
            return None
        values = np.array(array[row]).reshape(-1)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise InvalidRequest(f"{name} holds a value that is not a finite number; send finite numbers")
        return values

    def matrix(self, name: str, row: int) -> NDArray[Any] | None:
        """A copy of the row in its two dimensions; None when the input is absent or empty."""
        return np.array(self._arrays[name][row]) if self.has(name) else None

    def scalar(self, name: str, row: int) -> Any:
        """The row's one number, bool or string; None when the input is absent or empty."""
        values = self.vector(name, row)
        if values is None or values.size == 0:
            return None
        if values.size != 1:
            raise InvalidRequest(f"Invalid format for {name}: {values.size} values in a row, one is expected")
        return decode_text(name, values[0]) if values.dtype.kind == "O" else values[0].item()

    def check_texts(self, name: str, row: int, max_count: int, max_bytes: int, key: str = "") -> None:
        """Raise InvalidRequest when the row of a STRING input has more entries or bytes than allowed. Nothing is decoded.

        `key` is the configuration key of the limit on bytes; the error names it.
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
        """The strings of the row; an empty list when the input is absent."""
        values = self.vector(name, row)
        return [] if values is None else [decode_text(name, value) for value in values]

    def fields(self, section: str, row: int) -> dict[str, Any]:
        """All scalars whose target in the table is `section.FIELD`, by field name, without the absent ones."""
        found: dict[str, Any] = {}
        for name, spec in self._specs.items():
            owner, _, field = spec.target.partition(".")
            if owner == section and field not in found and (value := self.scalar(name, row)) is not None:
                found[field] = value
        return found

    def refuse_what_is_not_built(self) -> None:
        """Raise Unsupported when an input asks for a feature that this version lacks. Neutral values ask for nothing."""
        for name, array in self._arrays.items():
            spec = self._specs[name]
            if spec.target == "refused" and not _is_neutral(array, spec.neutral):
                remedy = f" or send {str(spec.neutral[0]).lower()}" if spec.neutral and spec.neutral[0] != "" else ""
                raise Unsupported(
                    f"{name} asks for {spec.feature}, which this version does not have; leave it out{remedy}"
                )


def _check_array(spec: Input, array: NDArray[Any], batched: bool) -> None:
    """Raise InvalidRequest unless the array has the input's type, and its dimensions behind that of the batch."""
    if array.dtype != np.dtype(NUMPY_TYPES[spec.dtype]):
        raise InvalidRequest(f"Invalid format for {spec.name}: the type is {array.dtype}, {spec.dtype} is expected")
    shape = array.shape[1:]
    if len(shape) != len(spec.dims) or any(want not in (-1, got) for want, got in zip(spec.dims, shape)):
        expected = ", ".join((["rows"] if batched else []) + ["any" if size == -1 else str(size) for size in spec.dims])
        got = list(array.shape if batched else shape)
        raise InvalidRequest(f"Invalid format for {spec.name}: the shape is {got}, [{expected}] is expected")


def _num_bytes(name: str, array: NDArray[Any]) -> int:
    """The size of an input. Raises InvalidRequest for more strings than have been read (string_tensors.py)."""
    if array.dtype.kind != "O":
        return array.nbytes
    if array.size > MAX_STRINGS:
        raise InvalidRequest(f"{name} holds {array.size} strings, the limit is {MAX_STRINGS}; send fewer")
    return sum(map(len, array.reshape(-1)))


def _is_neutral(array: NDArray[Any], neutral: tuple[Value, ...]) -> bool:
    if array.size > 1024:  # A neutral value is sent once per row, so a long tensor is taken as a use of the feature.
        return False
    wanted = [value.encode() if isinstance(value, str) else value for value in neutral]
    return all(value in wanted for value in array.reshape(-1).tolist())


def decode_text(name: str, value: Any) -> str:
    """Decode one element of a STRING tensor. Raises InvalidRequest when it is not UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8 at byte {error.start}; encode text as UTF-8") from None
