"""Writes the table of fields in docs/sampling.md from backend/api/sampling.py, between two markers.

.venv/bin/python -m tools.write_sampling_table          rewrite it
.venv/bin/python -m tools.write_sampling_table --check  fail when it is not up to date
"""

from __future__ import annotations

import sys

from backend.api.sampling import SAMPLING_FIELDS, WIRES, SamplingField
from tools.marked_part import MarkedPart

PART = MarkedPart(
    "sampling.md",
    "<!-- sampling fields: written by tools/write_sampling_table.py -->",
    "<!-- end of sampling fields -->",
)
_LIMITS = {0x7FFF_FFFF: "2^31 - 1", 0xFFFF_FFFF_FFFF_FFFF: "2^64 - 1"}


def table() -> str:
    """The table in Markdown, with empty lines around it."""
    head = ["field", "allowed", "with beams", *WIRES.values()]
    rows = [head, ["---"] * len(head), *map(_row, SAMPLING_FIELDS)]
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _row(field: SamplingField) -> list[str]:
    names = [", ".join(_shown(field, name) for name in field.names_on(wire)) for wire in WIRES]
    return [f"`{field.name}`", _allowed(field), _with_beams(field), *names]


def _shown(field: SamplingField, name: str) -> str:
    return "same" if name == field.name else f"`{name}`"


def _with_beams(field: SamplingField) -> str:
    if field.with_beams is None:
        return "any"
    return " or ".join(f"{value:g}" for value in field.with_beams) or "not allowed"


def _allowed(field: SamplingField) -> str:
    if field.least is None:
        return ""
    if field.greatest is None:
        return "a token id"
    greatest = _LIMITS.get(int(field.greatest), f"{field.greatest:g}")
    return f"{'more than 0' if field.excludes_zero else f'{field.least:g}'} to {greatest}"


if __name__ == "__main__":
    sys.exit(PART.run(table()))
