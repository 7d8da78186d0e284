"""What this project's engine uses of msgspec, for machines that cannot install it: structs, `convert`, `structs.replace`.

msgspec is the one package that the engine imports and that comes neither with torch nor with transformers. These structs are
dataclasses: slower to make than msgspec's, so the host's time per step is then measured too long; the file of results says
msgspec "absent". There is no encoding here: no process is talked to.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class ValidationError(Exception):
    pass


class Struct:
    __struct_fields__ = ()  # without annotations: those of a struct are its fields
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
    """`value`, of the type that is asked for. Raises ValidationError, which says where."""
    return _convert(value, kind, "$")


def _convert(value: Any, kind: Any, path: str) -> Any:
    kind = getattr(kind, "__supertype__", kind)  # typing.NewType
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
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
    hints = get_type_hints(kind)
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
    module, structs = types.ModuleType("msgspec"), types.ModuleType("msgspec.structs")
    module.Struct, module.convert, module.ValidationError, module.structs = Struct, convert, ValidationError, structs
    structs.replace = dataclasses.replace
    sys.modules |= {"msgspec": module, "msgspec.structs": structs}
    return True
