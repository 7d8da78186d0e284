"""The values of model.quantization."""

from __future__ import annotations

import re
from typing import NamedTuple

from backend.api.errors import ConfigError, shown

FORMATS = ("none", "int8", "w8a8", "w6a8", "w4a8")
LEAST_BITS, MOST_BITS = 4.5, 8.5  # bits a weight, scales included: w4a8, and w8a8 in groups of 32
_BUDGET = re.compile(r"auto:(\d{1,9}(?:\.\d{1,9})?)(MiB|GiB|)")
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


class Budget(NamedTuple):
    """The room for the weights of all decoder layers, in one of two units."""

    bits: float | None = None  # bits a weight
    num_bytes: float | None = None


def is_chosen(quantization: str) -> bool:
    """True if each layer has a format of its own."""
    return quantization.startswith("auto")


def budget_of(quantization: str) -> Budget | None:
    """The budget that `auto:BITS` or `auto:SIZE` gives; None for a format. Raises ConfigError for anything else."""
    if quantization in FORMATS:
        return None
    found = _BUDGET.fullmatch(quantization)
    if found is not None and found[2]:
        return Budget(num_bytes=float(found[1]) * _UNITS[found[2]])
    if found is not None and LEAST_BITS <= float(found[1]) <= MOST_BITS:
        return Budget(bits=float(found[1]))
    raise ConfigError(
        f"model.quantization is {shown(quantization)}; use one of {', '.join(FORMATS)}, auto:BITS with {LEAST_BITS} to "
        f"{MOST_BITS} bits a weight, or auto:SIZE as in auto:2GiB"
    )
