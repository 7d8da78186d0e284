"""A planted bug as a change of a function's text, so that it is as small as a slip of the pen."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

SetAttribute = Callable[[object, str, object], None]
Plant = Callable[[SetAttribute], None]


def replace(owner: object, name: str, value: object) -> Plant:
    """Put `value` in the place of an attribute of `owner`."""
    return lambda set_attribute: set_attribute(owner, name, value)


def change(owner: object, name: str, *replacements: tuple[str, str]) -> Plant:
    """Replace texts of a function, method or property of `owner`. AssertionError where a text is not there exactly once."""

    def plant(set_attribute: SetAttribute) -> None:
        attribute = inspect.getattr_static(owner, name)
        function = attribute.fget if isinstance(attribute, property) else attribute
        set_attribute(owner, name, _changed(function, replacements))

    return plant


def change_everywhere(function: Callable[..., object], *replacements: tuple[str, str]) -> Plant:
    """The same of a module's function, also for those who hold it already: in a table, or imported by its name."""

    def plant(set_attribute: SetAttribute) -> None:
        set_attribute(function, "__code__", _changed(function, replacements).__code__)

    return plant


def _changed(function: Any, replacements: Iterable[tuple[str, str]]) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in replacements:
        assert source.count(old) == 1, f"{function.__name__} has {source.count(old)} times {old!r}; mend the mutant"
        source = source.replace(old, new)
    code = compile(source, f"<mutant of {function.__name__}>", "exec", flags=__future__.annotations.compiler_flag)
    found: dict[str, Any] = {}
    exec(code, inspect.unwrap(function).__globals__, found)
    return found[function.__name__]
