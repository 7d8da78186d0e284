"""A planted bug as a change of a function's text, so that it is as small as a slip of the pen."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable

SetAttribute = Callable[[object, str, object], None]
Plant = Callable[[SetAttribute], None]


def change(owner: object, name: str, *replacements: tuple[str, str]) -> Plant:
    """Replace texts of a function, method or property of `owner`. AssertionError where a text is not there exactly once."""

    def plant(set_attribute: SetAttribute) -> None:
        attribute = inspect.getattr_static(owner, name)
        function = attribute.fget if isinstance(attribute, property) else attribute
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in replacements:
            assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}; mend the mutant"
            source = source.replace(old, new)
        code = compile(source, f"<mutant of {name}>", "exec", flags=__future__.annotations.compiler_flag)
        found: dict[str, object] = {}
        exec(code, inspect.unwrap(function).__globals__, found)
        set_attribute(owner, name, found[function.__name__])

    return plant
