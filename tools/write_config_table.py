"""Writes the configuration table of docs/configuration.md from backend/api/config/schema.py, between two markers.

    .venv/bin/python -m tools.write_config_table          rewrite it
    .venv/bin/python -m tools.write_config_table --check  fail when it is not up to date

Names, types and defaults come from the classes; the meaning is the comment beside each field, so there is one place to edit.
"""

from __future__ import annotations

import ast
import sys

from tools.marked_part import ROOT, MarkedPart

SOURCE = ROOT / "backend/api/config/schema.py"
PART = MarkedPart(
    "configuration.md",
    "<!-- configuration: written by tools/write_config_table.py -->",
    "<!-- end of configuration -->",
)


def table() -> str:
    """The table in Markdown."""
    text = SOURCE.read_text()
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for section in _fields(classes["EngineConfig"]):
        for field in _fields(classes[ast.unparse(section.annotation)]):
            key = f"{ast.unparse(section.target)}.{ast.unparse(field.target)}"
            lines.append(_row(key, field, text.splitlines()[field.lineno - 1]))
    return "\n".join(lines)


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [item for item in node.body if isinstance(item, ast.AnnAssign)]


def _row(key: str, field: ast.AnnAssign, line: str) -> str:
    if field.value is None:
        raise ValueError(f"{key} has no default")
    default = ast.literal_eval(field.value)
    if not line.partition("  # ")[2]:
        raise ValueError(f"{key} has no comment on its line")
    shown = "unset" if default in (None, "") else str(default).lower() if isinstance(default, bool) else str(default)
    return f"| `{key}` | {shown} | {line.partition('  # ')[2]} |"


if __name__ == "__main__":
    sys.exit(PART.run(table()))
