"""Writes the tables of docs/parameters.md from backend/serving/upstream_parameters.py, between two markers.

.venv/bin/python -m tools.write_parameter_table          rewrite them
.venv/bin/python -m tools.write_parameter_table --check  fail when they are not up to date
"""

from __future__ import annotations

import sys

from backend.serving.upstream_parameters import PARAMETERS, QUEUE_SIZE, Parameter
from tools.marked_part import MarkedPart

PART = MarkedPart(
    "parameters.md", "<!-- parameters: written by tools/write_parameter_table.py -->", "<!-- end of parameters -->"
)


def tables() -> str:
    """The tables in Markdown, one for each model, with empty lines around them."""
    parts = []
    for role, parameters in PARAMETERS.items():
        rows = [_row(parameter) for parameter in parameters]
        if role == "tensorrt_llm":
            rows.append(f"| `{QUEUE_SIZE}` | sets `limits.max_queue_size` | 0: unset |")
        parts.append("\n".join([f"## `{role}`", "", "| key | what becomes of it | |", "|---|---|---|", *rows]))
    return "\n" + "\n\n".join(parts) + "\n"


def _row(parameter: Parameter) -> str:
    if parameter.fate == "refused":
        allowed = f"; {', '.join(f'`{value}`' for value in parameter.neutral)} may be set" if parameter.neutral else ""
        return f"| `{parameter.key}` | refused | {parameter.note}{allowed} |"
    if parameter.fate == "no effect":
        return f"| `{parameter.key}` | no effect | {parameter.note} |"
    effect = f"sets `{parameter.target}`" if parameter.target else "honoured"
    return f"| `{parameter.key}` | {effect} | {parameter.note} |"


if __name__ == "__main__":
    sys.exit(PART.run(tables()))
