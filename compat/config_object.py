"""ConfigObject: a configuration class whose fields are its annotations, and which knows the fields that were given.

    class CudaGraphConfig(ConfigObject):
        batch_sizes: list[int] | None = None

Only fields that were given reach the engine's configuration, so the engine's own defaults hold for the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Self, dataclass_transform


@dataclass_transform(kw_only_default=True)
class ConfigObject:
    """Keyword arguments only. Attributes may be set later; TypeError and AttributeError name the nearest field.

    `argument`: the argument that takes it, or the place within another one. `refused`: why an object of this class is refused,
    and what to use instead; empty where it is taken. The value of a field that was not given is the other project's default,
    which is shown but not passed on.
    """

    argument: ClassVar[str] = ""
    refused: ClassVar[str] = ""
    fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        own = [name for name, kind in vars(cls).get("__annotations__", {}).items() if "ClassVar" not in str(kind)]
        cls.fields = (*cls.fields, *(name for name in own if name not in cls.fields))

    def __init__(self, **given: Any) -> None:
        for name, value in given.items():
            if name not in self.fields:
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {self._unknown(name)}")
            object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Raises TypeError for a key that is no field."""
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """All fields, defaults included; objects in them as they are."""
        return {name: getattr(self, name) for name in self.fields}

    def model_dump(self, exclude_unset: bool = False) -> dict[str, Any]:
        """The fields as a dictionary, as pydantic's classes give them; with `exclude_unset` only what was given."""
        return self.given() if exclude_unset else self.to_dict()

    def given(self) -> dict[str, Any]:
        """The fields that were given or set."""
        return dict(vars(self))

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name[:80], self.fields, n=1)
        known = f"known are {', '.join(self.fields)}" if self.fields else "it takes none"
        return f"{name[:80]!r}; {f'did you mean {near[0]}?' if near else known}"

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.fields:
            raise AttributeError(f"{type(self).__name__} has no field {self._unknown(name)}")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if type(other) is type(self) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
