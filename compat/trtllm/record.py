"""Record: a class made from a table of fields, which behaves like a class bound by pybind11.

    class AdditionalModelOutput(Record):
        name: str = field(STR)
        gather_context: bool = field(BOOL, default=False)

The constructor takes the fields by position or name; an unknown argument and a value of the wrong type raise TypeError with the
signature. Attributes are checked when they are set, too. Records compare by value, print, and pickle with all attributes.
Attributes that are no fields can be set only where the class says `dynamic=True`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, dataclass_transform

from compat.trtllm.kinds import FieldKind, OutOfRange, is_tensor

REQUIRED = inspect.Parameter.empty


class Field:
    """One attribute, as a data descriptor. Its value lies in the record's `__dict__`, so that pickle finds it."""

    def __init__(
        self,
        kind: FieldKind,
        default: Any,
        factory: Callable[[], Any] | None,
        read_only: bool,
        kw_only: bool,
        alias: str,
        doc: str,
    ) -> None:
        self.kind, self.default, self.factory = kind, default, factory
        self.read_only, self.kw_only = read_only, kw_only
        self.__doc__ = doc or kind.name
        self.name, self.alias = "", alias

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED and self.factory is None

    def initial(self) -> Any:
        return self.default if self.factory is None else self.factory()

    def checked(self, value: Any) -> Any:
        """The value to store. Raises TypeError for a value of the wrong kind, RuntimeError for a value out of range."""
        try:
            return self.kind.check(value)
        except OutOfRange as error:
            raise RuntimeError(f"{self.name} is {shown(value)}, allowed is {error}") from None
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"{self.name} is {shown(value)}, {self.kind.name} is needed") from None

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.alias = self.alias or name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else instance.__dict__[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        owner = type(instance).__qualname__
        if self.read_only:
            raise AttributeError(f"property '{self.name}' of '{owner}' object has no setter")
        try:
            instance.__dict__[self.name] = self.checked(value)
        except TypeError as error:
            raise TypeError(f"{owner}: incompatible function arguments: {error}") from None


def field(
    kind: FieldKind,
    *,
    default: Any = REQUIRED,
    factory: Callable[[], Any] | None = None,
    read_only: bool = False,
    kw_only: bool = False,
    alias: str = "",
    doc: str = "",
) -> Any:
    """A field of a record. Without `default` or `factory` its argument must be given. `read_only`: set by the constructor only.

    `alias`: the name of its argument, where that differs from the name of the attribute.
    """
    return Field(kind, default, factory, read_only, kw_only, alias, doc)


def constant(kind: FieldKind, *, default: Any = REQUIRED) -> Any:
    """A field that only the constructor sets."""
    return field(kind, default=default, read_only=True)


@dataclass_transform(field_specifiers=(field, constant), eq_default=False)
class Record:
    """Base of the classes with fields; the docstring of the module describes them."""

    _fields: ClassVar[dict[str, Field]] = {}
    _is_dynamic: ClassVar[bool] = False

    def __init_subclass__(cls, dynamic: bool = False) -> None:
        super().__init_subclass__()
        own = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        cls._fields = {**cls._fields, **own}
        cls._is_dynamic = dynamic or cls._is_dynamic
        setattr(cls, "__signature__", _signature(cls._fields))  # noqa: B010 (type has no such attribute for mypy)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = self.__dict__
        for name, each in self._fields.items():
            if args and not each.kw_only:
                if each.alias in kwargs:
                    raise self._refusal(f"{each.alias} is given twice", args, kwargs)
                given, args = args[0], args[1:]
            elif each.alias in kwargs:
                given = kwargs.pop(each.alias)
            elif each.is_required:
                raise self._refusal(f"{each.alias} is missing", args, kwargs)
            else:
                values[name] = each.initial()
                continue
            try:
                values[name] = each.checked(given)
            except TypeError as error:
                raise self._refusal(str(error), args, kwargs) from None
        if args or kwargs:
            raise self._refusal("there are more arguments than that", args, kwargs)
        self._made()

    def _made(self) -> None:
        """Called at the end of the constructor, for classes that check several fields together."""

    def _refusal(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
        name = type(self).__qualname__
        invoked = [shown(value) for value in args] + [f"{key}={shown(value)}" for key, value in kwargs.items()]
        return TypeError(
            f"__init__(): incompatible constructor arguments: {reason}. The following argument types are supported:\n"
            f"    1. {name}{inspect.signature(type(self))}\n\nNot taken: {', '.join(invoked)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fields or self._is_dynamic or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            raise AttributeError(f"'{type(self).__qualname__}' object has no attribute '{name}'")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, its = self.__dict__, other.__dict__
        return mine.keys() == its.keys() and all(same(value, its[name]) for name, value in mine.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={shown(value)}" for name, value in self.__dict__.items())
        return f"{type(self).__qualname__}({inside})"

    def copied(self) -> Any:
        """A copy with copies of the records in it; tensors and functions are shared."""
        twin = object.__new__(type(self))
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value.copied() if isinstance(value, Record) else value
        return twin


def copy_of(cls: type[Record]) -> FieldKind:
    """A record of a class, stored as a copy: later changes of the original have no effect, as in C++."""

    def check(value: Any) -> Any:
        if not isinstance(value, cls):
            raise TypeError
        return value.copied()

    return FieldKind(cls.__qualname__, check)


def same(one: Any, other: Any) -> bool:
    """True if both are equal by value, also for tensors."""
    if is_tensor(one) or is_tensor(other):
        alike = is_tensor(one) and is_tensor(other) and one.shape == other.shape and one.dtype == other.dtype
        return bool(alike and (one == other).all())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def shown(value: Any) -> str:
    """A short `repr`, with the shape in place of a tensor's values."""
    if is_tensor(value):
        return f"<tensor {value.dtype} {list(value.shape)}>"
    try:
        text = repr(value)
    except ValueError:  # a number with more digits than Python converts
        text = f"<{type(value).__name__} of thousands of digits>"
    return text if len(text) <= 500 else f"{text[:500]}..."


def _signature(fields: dict[str, Field]) -> inspect.Signature:
    """The signature, with the positional arguments in front."""
    parameters = [
        inspect.Parameter(
            each.alias,
            inspect.Parameter.KEYWORD_ONLY if each.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=REQUIRED if each.is_required else each.initial(),
            annotation=each.kind,
        )
        for each in fields.values()
    ]
    return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))
