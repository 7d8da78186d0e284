"""Writes the table of families in docs/models.md from backend/architectures/registry.py and hosted.py, between two markers.

.venv/bin/python -m tools.write_model_table          rewrite it
.venv/bin/python -m tools.write_model_table --check  fail when it is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from backend.architectures.gguf.families import GGUF_FAMILIES
from backend.architectures.hosted import ENCODERS, HOSTED, PARTS, REASONS
from backend.architectures.registry import FAMILIES, HEADLESS, Family
from tools.marked_part import MarkedPart
from tools.write_gguf_table import ALSO

PART = MarkedPart(
    "models.md",
    "<!-- families: written by tools/write_model_table.py -->",
    "<!-- end of families -->",
)
_GGUF = {
    *(family.architecture for family in GGUF_FAMILIES.values()),
    *(each for also in ALSO.values() for each in also),
}


def table() -> str:
    """The table in Markdown, with empty lines around it."""
    head = ["architecture in config.json", "models", "implementation", "checkpoints"]
    rows = [head, ["---"] * len(head), *(_row(name, family) for name, family in FAMILIES.items())]
    hosted = sorted({*HOSTED, *PARTS} - {*FAMILIES})
    parts = [
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        f"Run by **transformers**, in floats (gpt-oss in MXFP4, too): {_listed(hosted)}.",
        f"Decoders without a head, native, for [embeddings](embeddings.md) only: {_listed(HEADLESS)}.",
        f"Encoders, run by transformers, in floats, for [embeddings](embeddings.md) only: {_listed(sorted(ENCODERS))}.",
        "Known to transformers and **refused**, with the reason:",
        "\n".join(f"- {reason}: {_listed(sorted(names))}" for reason, names in REASONS.items()),
    ]
    return "\n" + "\n\n".join(parts) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(name: str, family: Family) -> list[str]:
    formats = ["floats", *(["quantised"] if family.is_quantised else []), *(["GGUF"] if name in _GGUF else [])]
    return [f"`{name}`", family.models, "native", ", ".join(formats)]


if __name__ == "__main__":
    sys.exit(PART.run(table()))
