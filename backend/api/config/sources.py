"""Where each setting comes from, so that an error about it can say which file or which --set is to be changed."""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_SHOWN = 100  # characters of a value that an error repeats


def shown(text: str) -> str:
    """The beginning of a text, as long as an error may repeat it."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class ConfigSources:
    """Remembers the place of each key that was given. A later place replaces an earlier one."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}  # section.key, and section -> place

    def add_file(self, name: str, tree: Mapping[str, object]) -> None:
        """Everything in the `tree` of the file that is called `name`."""
        for section, values in tree.items():
            self._places[section] = name
            for key in values if isinstance(values, dict) else ():
                self._places[f"{section}.{key}"] = name

    def add_override(self, key: str, override: str) -> None:
        """One `--set`, as it was written."""
        self._places[key] = self._places[key.partition(".")[0]] = f"--set {shown(override)}"

    def of(self, message: str) -> str:
        """` (KEY is from PLACE, ...)` for the keys that the first clause of `message` names; empty where none was given."""
        clause = message.partition(";")[0]
        named = [key for key in self._places if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", clause)]
        named.sort(key=clause.index)
        text = ", ".join(f"{key} is from {self._places[key]}" for key in named)
        return f" ({text})" if text else ""
