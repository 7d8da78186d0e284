"""The models that requests may name, and the Triton model of each (docs/several-models.md)."""

from __future__ import annotations

import msgspec


class Served(msgspec.Struct, forbid_unknown_fields=True):
    """A model: the Triton model that is asked, the names that clients may send, and the names of its LoRA adapters, which change
    while the server runs. `label`: of the metrics of its engine; empty: there is one engine. The formats are those of Settings.
    """

    triton_model: str
    names: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    label: str = ""
    tool_format: str = "hermes"
    reasoning_format: str = "none"
    prompt_adapters: tuple[str, ...] = ()

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.names, *self.adapters, *self.prompt_adapters)


def served_of(text: str) -> Served:
    """Read the JSON that the launcher gives. Raises ValueError."""
    return msgspec.json.decode(text, type=Served)
