"""Parameters of other projects' interfaces: the type of the tables that say what becomes of each, and the check of given values.

Each interface has its table beside the code that reads it. docs/parameters.md is written from all of them by
tools/write_parameter_table.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from backend.api.errors import ConfigError

MAX_SHOWN = 80  # characters of a name or of a value in a message
RANKS_KEY = "workers.tensor_parallel_size"
MAX_UNKNOWN = 4  # unknown names in a message
Fate = Literal["honoured", "no effect", "refused"]


class UnknownParameter(ConfigError):
    """There is no parameter of this name."""


class RefusedParameter(ConfigError):
    """A parameter has a value that asks for what this version does not serve, or one that it cannot have."""


class ForeignParameter(NamedTuple):
    """One parameter of another project, and what becomes of it here.

    `note`: what `target` does not say of an honoured one; why another one has no effect or is refused.
    `target`: the key of the configuration that an honoured one sets; empty where the interface uses the value itself.
    `convert`: makes the key's value, and raises ValueError with what is expected. None, given or made, sets nothing.
    `neutral`: values of a refused one that ask for nothing, texts in lower case. None, False and [] ask for nothing either.
    """

    key: str
    fate: Fate
    note: str = ""
    target: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    neutral: tuple[Any, ...] = ()


class Setting(NamedTuple):
    """A value for a key of the configuration, and the foreign parameter that it comes from."""

    key: str
    value: Any


class Checked(NamedTuple):
    """`settings`: by key of the configuration. `remarks`: a sentence about each parameter that has no effect."""

    settings: dict[str, Setting]
    remarks: list[str]


def honoured(
    key: str, target: str = "", note: str = "", convert: Callable[[Any], Any] | None = None
) -> ForeignParameter:
    parameter = ForeignParameter(key, "honoured", note, target)
    return parameter if convert is None else parameter._replace(convert=convert)


def no_effect(why: str, *keys: str) -> tuple[ForeignParameter, ...]:
    return tuple(ForeignParameter(key, "no effect", why) for key in keys)


def refused(why: str, *keys: str, neutral: tuple[Any, ...] = ()) -> tuple[ForeignParameter, ...]:
    return tuple(ForeignParameter(key, "refused", why, neutral=neutral) for key in keys)


class ForeignTable:
    """All parameters of one interface. `label`: how messages name one, with {} for its key."""

    def __init__(self, label: str, *parameters: ForeignParameter) -> None:
        self._label = label
        self._parameters = {parameter.key: parameter for parameter in parameters}

    def __iter__(self) -> Iterator[ForeignParameter]:
        return iter(self._parameters.values())

    def __contains__(self, key: object) -> bool:
        return key in self._parameters

    def check(self, given: Mapping[str, Any]) -> Checked:
        """Settings and remarks from given values, in the order of the table. The later of two parameters with one target wins.

        Raises UnknownParameter and RefusedParameter with the name, the value and the remedy.
        """
        unknown = [self.unknown(key) for key in given if key not in self._parameters]
        if unknown:
            raise UnknownParameter(". ".join(unknown[:MAX_UNKNOWN]))
        settings, remarks = {}, []
        for key, parameter in self._parameters.items():
            if key not in given:
                continue
            value = given[key]
            if parameter.fate == "refused":
                self._refuse(parameter, value)
            elif parameter.fate == "no effect":
                remarks.append(f"{self._label.format(key)} has no effect here: {parameter.note}")
            elif (made := self._made(parameter, value)) is not None and parameter.target:
                settings[parameter.target] = Setting(key, made)
        return Checked(settings, remarks)

    def unknown(self, key: str) -> str:
        """A sentence about an unknown parameter, with the known one that is spelled most alike."""
        near = difflib.get_close_matches(key[:MAX_SHOWN], self._parameters, n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/parameters.md lists those that are"
        return f"{self._label.format(key[:MAX_SHOWN])} is no known parameter; {hint}"

    def _refuse(self, parameter: ForeignParameter, value: Any) -> None:
        """Raise RefusedParameter unless the value asks for nothing."""
        if value is None or value is False or value == []:
            return
        if (value.lower() if isinstance(value, str) else value) in parameter.neutral:
            return
        neutral = [each for each in parameter.neutral if each is not None]
        remedy = f"leave it out or set it to {neutral[0]}" if neutral else "leave it out"
        raise RefusedParameter(
            f"{self._named(parameter, value)}, which this version does not serve: {parameter.note}; {remedy}"
        )

    def _made(self, parameter: ForeignParameter, value: Any) -> Any:
        try:
            return parameter.convert(value)
        except ValueError as error:
            raise RefusedParameter(f"{self._named(parameter, value)}: {error}") from None

    def _named(self, parameter: ForeignParameter, value: Any) -> str:
        return f"{self._label.format(parameter.key)} is {repr(value)[:MAX_SHOWN]}"


def ranks_of_stage(ranks: Setting, stages: int) -> int:
    """The ranks of each of `stages`, where `ranks` counts those of all together. Raises ConfigError for a fraction."""
    if ranks.value % stages:
        raise ConfigError(
            f"{ranks.key} has {ranks.value} ids, and workers.pipeline_parallel_size is {stages}; give {stages} ids for each rank "
            f"of a stage"
        )
    return int(ranks.value // stages)


def put(settings: Mapping[str, Setting], tree: dict[str, Any]) -> None:
    """Write the settings into a configuration, given as a tree of sections and keys."""
    for target, setting in settings.items():
        section, _, name = target.partition(".")
        tree[section][name] = setting.value
