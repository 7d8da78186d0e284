"""The part of a page of docs/ that a tool writes, between two markers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class MarkedPart(NamedTuple):
    """`page`: its name in docs/."""

    page: str
    begin: str
    end: str

    def replaced(self, page: str, text: str) -> str:
        """`page` with `text` between the markers."""
        head, _, rest = page.partition(self.begin)
        _, _, tail = rest.partition(self.end)
        return f"{head}{self.begin}\n{text}\n{self.end}{tail}"

    def run(self, text: str) -> int:
        """Write the page or, with --check, report if that would change it. Returns the exit status."""
        path = ROOT / "docs" / self.page
        page = path.read_text()
        fresh = self.replaced(page, text)
        if "--check" in sys.argv:
            return 0 if fresh == page else 1
        path.write_text(fresh)
        return 0
