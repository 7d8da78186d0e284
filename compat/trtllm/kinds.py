"""Kinds of values in the fields of records: each checks and converts a value.

They accept the values that pybind11 accepts for the C++ type of the same name: an int for a float, and an object with
`__index__` (a numpy scalar, a tensor of one element) for an int, but no float for an int, no negative number for an unsigned
int and no text for a list.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

Check = Callable[[Any], Any]


class FieldKind(NamedTuple):
    """`check` returns the value to store, and raises TypeError for a value of another kind. `name`: in signatures."""

    name: str
    check: Check

    def __repr__(self) -> str:
        return self.name


def _is_of(*types: type) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError
        return value

    return check


def _integer(least: int, greatest: int) -> Check:
    def check(value: Any) -> int:
        number = operator.index(_scalar(value))
        if not least <= number <= greatest:
            raise TypeError
        return number

    return check


def _scalar(value: Any) -> Any:
    """The element of an array with one element. numpy itself converts only arrays without dimensions to an index."""
    return value.item() if hasattr(value, "__array__") and getattr(value, "size", 0) == 1 else value


def _boolean(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError


def _real(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError
    number = float(value)
    return number if not isinstance(value, float) else value


def is_tensor(value: object) -> bool:
    """True if it is a torch tensor. Does not import torch: without torch loaded there are no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _tensor(value: Any) -> Any:
    if not is_tensor(value):
        raise TypeError
    return value


def _callable(value: Any) -> Any:
    if not callable(value):
        raise TypeError
    return value


def _path_text(value: Any) -> str:
    if not isinstance(value, str | Path):
        raise TypeError
    return str(value)


INT32 = FieldKind("int", _integer(-(1 << 31), (1 << 31) - 1))
INT64 = FieldKind("int", _integer(-(1 << 63), (1 << 63) - 1))
UINT32 = FieldKind("int", _integer(0, (1 << 32) - 1))
UINT64 = FieldKind("int", _integer(0, (1 << 64) - 1))
BOOL = FieldKind("bool", _boolean)
FLOAT = FieldKind("float", _real)
STR = FieldKind("str", _is_of(str))
PATH = FieldKind("os.PathLike", _path_text)
BYTES = FieldKind("bytes", _is_of(bytes))
TIMEDELTA = FieldKind("datetime.timedelta", _is_of(timedelta))
TENSOR = FieldKind("torch.Tensor", _tensor)
CALLABLE = FieldKind("Callable", _callable)
ANY = FieldKind("Any", lambda value: value)


def optional(kind: FieldKind) -> FieldKind:
    """None, or a value of `kind`."""
    return FieldKind(f"Optional[{kind.name}]", lambda value: None if value is None else kind.check(value))


def list_of(kind: FieldKind) -> FieldKind:
    """A sequence or one-dimensional array of items of `kind`, but no text; stored as a new list."""

    def check(value: Any) -> list[Any]:
        if isinstance(value, str | bytes) or not (isinstance(value, Sequence) or hasattr(value, "__array__")):
            raise TypeError
        return [kind.check(item) for item in value]

    return FieldKind(f"List[{kind.name}]", check)


def _tokens(value: Any) -> list[int]:
    if type(value) is list and set(map(type, value)) <= {int}:  # the fast path: token lists are by far the longest
        if value and not (-(1 << 31) <= min(value) and max(value) < 1 << 31):
            raise TypeError
        return value.copy()
    return list(_any_tokens.check(value))


_any_tokens = list_of(INT32)
TOKENS = FieldKind("List[int]", _tokens)


def dict_of(key: FieldKind, value: FieldKind) -> FieldKind:
    def check(given: Any) -> dict[Any, Any]:
        if not isinstance(given, Mapping):
            raise TypeError
        return {key.check(name): value.check(item) for name, item in given.items()}

    return FieldKind(f"Dict[{key.name}, {value.name}]", check)


class OutOfRange(Exception):
    """A value has the right type but is not allowed; the message says which values are."""


def within(kind: FieldKind, allowed: str, is_allowed: Callable[[Any], bool]) -> FieldKind:
    """Values of a kind within a range, which `allowed` describes in words. Other values of the kind raise OutOfRange."""

    def check(value: Any) -> Any:
        checked = kind.check(value)
        if not is_allowed(checked):
            raise OutOfRange(allowed)
        return checked

    return FieldKind(kind.name, check)


COUNT = within(INT32, "0 or more", lambda value: value >= 0)
POSITIVE = within(INT32, "1 or more", lambda value: value >= 1)
FRACTION = within(FLOAT, "more than 0 to 1", lambda value: 0 < value <= 1)


def of(cls: type) -> FieldKind:
    """An object of a class, kept by reference."""
    return FieldKind(cls.__qualname__, _is_of(cls))
