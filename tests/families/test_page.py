"""docs/models.md and docs/gguf.md have the tables of what is served, and README.md leads to them."""

from __future__ import annotations

from pathlib import Path

from tools import write_gguf_table, write_model_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/models.md").read_text()
    fresh = write_model_table.PART.replaced(page, write_model_table.table())
    assert fresh == page, "run python -m tools.write_model_table"


def test_the_page_of_gguf_files_has_its_tables() -> None:
    page = (ROOT / "docs/gguf.md").read_text()
    fresh = write_gguf_table.PART.replaced(page, write_gguf_table.tables())
    assert fresh == page, "run python -m tools.write_gguf_table"


def test_the_page_is_linked() -> None:
    assert "(docs/models.md)" in (ROOT / "README.md").read_text()
    assert "(models.md)" in (ROOT / "docs/README.md").read_text()
