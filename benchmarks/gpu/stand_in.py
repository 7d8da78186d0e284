"""The part of msgspec that the engine uses, for machines that cannot install it: structs, `field`, `convert`, `Meta` and
`json.decode`.

msgspec is the one package that the engine imports and that comes neither with torch nor with transformers. These structs are
dataclasses: slower to make than msgspec's, so the host's time per step is then measured too long; the file of results says
msgspec "absent". There is no encoding here: no process is talked to.
A name that a JSON object holds twice is not noticed.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import operator
import sys
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


class DecodeError(Exception):
    pass


class ValidationError(DecodeError):
    pass


class Raw(bytes):
    """JSON that is decoded later."""


class Meta:
    """Bounds of a number, as in `Annotated[int, Meta(ge=1)]`."""

    _COMPARE = {
        "ge": (operator.ge, ">="),
        "gt": (operator.gt, ">"),
        "le": (operator.le, "<="),
        "lt": (operator.lt, "<"),
        "multiple_of": (lambda value, bound: value % bound == 0, "that's a multiple of"),
    }

    def __init__(self, **bounds: float) -> None:
        self._bounds = bounds

    def check(self, value: Any, kind: Any, path: str) -> None:
        for name, bound in self._bounds.items():
            holds, sign = self._COMPARE[name]
            if value is not None and not holds(value, bound):
                raise _wrong(f"Expected `{getattr(kind, '__name__', kind)}` {sign} {bound}", path)


class Struct:
    __struct_fields__ = ()  # has no annotation, because the annotations of a struct are its fields
    _forbids_unknown = False

    def __init_subclass__(cls, frozen: bool = False, forbid_unknown_fields: bool = False, **ignored: object) -> None:
        cls._forbids_unknown = forbid_unknown_fields
        for name in cls.__dict__.get("__annotations__", {}):
            default = cls.__dict__.get(name)
            if isinstance(default, (list, dict, set)) or (isinstance(default, Struct) and default.__hash__ is None):
                setattr(cls, name, dataclasses.field(default_factory=lambda made=default: type(made)(made)))
        dataclasses.dataclass(cls, eq=True, unsafe_hash=frozen)
        cls.__struct_fields__ = tuple(field.name for field in dataclasses.fields(cls))


def convert(value: Any, kind: Any) -> Any:
    """Returns `value` as the type that is asked for. Raises ValidationError, which says where."""
    return _convert(value, kind, "$")


def _convert(value: Any, kind: Any, path: str) -> Any:  # noqa: C901 (a case for each kind of type)
    kind = getattr(kind, "__supertype__", kind)  # typing.NewType
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind is Raw:
        return Raw(json.dumps(value).encode())
    if origin is Annotated:
        converted = _convert(value, arguments[0], path)
        for note in arguments[1:]:
            note.check(converted, arguments[0], path)
        return converted
    if origin in (Union, types.UnionType):
        return _of_any(value, arguments, path)
    if origin is Literal:
        if value in arguments:
            return value
        raise _wrong(f"Invalid enum value {value!r}", path)
    if kind is None or kind is type(None):
        if value is None:
            return None
        raise _expected("null", value, path)
    if origin in (list, tuple):
        return _items(value, origin, arguments, path)
    if origin is dict:
        if not isinstance(value, dict):
            raise _expected("object", value, path)
        return {key: _convert(item, arguments[1], f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, kind) and not (isinstance(value, bool) and kind in (int, float)):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, dict):
        return _struct(value, kind, path)
    raise _expected(getattr(kind, "__name__", str(kind)), value, path)


def decode_json(text: str | bytes, *, type: Any = Any) -> Any:
    """msgspec.json.decode. Raises DecodeError for what is not JSON, ValidationError for what is not of the type."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DecodeError(str(error)) from None
    return convert(value, type)


def _of_any(value: Any, kinds: tuple[Any, ...], path: str) -> Any:
    first = None
    for kind in kinds:
        try:
            return _convert(value, kind, path)
        except ValidationError as error:
            first = first or error
    raise first


def _items(value: Any, origin: Any, arguments: tuple[Any, ...], path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _expected("array", value, path)
    kinds = [arguments[0]] * len(value) if origin is list or arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(value):
        raise _wrong(f"Expected `array` of length {len(kinds)}", path)
    return origin(_convert(item, kind, f"{path}[{i}]") for i, (item, kind) in enumerate(zip(value, kinds)))


def _struct(value: dict, kind: type[Struct], path: str) -> Struct:
    hints = get_type_hints(kind, include_extras=True)
    unknown = [key for key in value if key not in kind.__struct_fields__]
    if unknown and kind._forbids_unknown:
        raise _wrong(f"Object contains unknown field `{unknown[0]}`", path)
    given = {key: _convert(item, hints[key], f"{path}.{key}") for key, item in value.items() if key not in unknown}
    try:
        return kind(**given)
    except TypeError:
        missing = [field.name for field in dataclasses.fields(kind) if field.name not in given]
        raise _wrong(f"Object missing required field, one of {missing}", path) from None


def _expected(name: str, value: Any, path: str) -> ValidationError:
    return _wrong(f"Expected `{name}`, got `{type(value).__name__}`", path)


def _wrong(message: str, path: str) -> ValidationError:
    return ValidationError(f"{message} - at `{path}`")


def install_where_missing() -> bool:
    """Take msgspec's place where it is not installed. Whether it was taken."""
    try:
        importlib.import_module("msgspec")
        return False
    except ImportError:
        pass
    names = ("msgspec", "msgspec.structs", "msgspec.json")
    module, structs, as_json = (types.ModuleType(name) for name in names)
    for kind in (Struct, Meta, Raw, DecodeError, ValidationError, convert):
        setattr(module, kind.__name__, kind)
    module.structs, module.json, module.field = structs, as_json, dataclasses.field
    structs.replace, structs.asdict, as_json.decode = dataclasses.replace, dataclasses.asdict, decode_json
    sys.modules |= dict(zip(names, (module, structs, as_json)))
    return True
