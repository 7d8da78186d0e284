"""The families that transformers runs (backend/hosted), by architecture, and those that it knows and this server refuses.

Every entry was decided by a test that builds a tiny checkpoint of the family (tests/hosted).
"""

from __future__ import annotations

from typing import Any, Literal

from backend.api.config import Implementation
from backend.api.supported import ARCHITECTURES

HOSTED: tuple[str, ...] = ()
REFUSED: dict[str, str] = {}


def implementation_of(content: dict[str, Any], wanted: Implementation) -> Literal["native", "transformers"]:
    """Which implementation runs the model of a config.json."""
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if wanted == "transformers" or (wanted == "auto" and name not in ARCHITECTURES and name in HOSTED):
        return "transformers"
    return "native"
