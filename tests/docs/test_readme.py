"""The README tells the truth where a machine can check it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels.cpu.build import COMPILE_TIME
from tests.docs import links
from tools import write_config_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_configuration_table_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    fresh = write_config_table.PART.replaced(page, write_config_table.table())
    assert fresh == page, "run python -m tools.write_config_table"


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "backend/README.md", "models/default/README.md"]
PAGES += [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: str) -> None:
    assert links.dead_links(ROOT / page) == []


def test_a_dead_file_and_a_dead_heading_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`, three\n\n[a](#one-two-three) [b](#four) [c](none.md) [d](page.md#five) [e](https://host/x#y)\n"
    )
    assert links.dead_links(page) == ["#four", "none.md", "page.md#five"]


def test_every_page_that_code_names_exists() -> None:
    named = list(links.pages_in_code())
    assert len(named) > 20
    assert [(file, page) for file, page in named if not (ROOT / page).exists()] == []


def test_the_index_of_docs_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert sorted(page for page in pages if f"]({page})" not in index) == []


def test_each_client_of_the_table_has_a_test_or_says_that_it_has_none() -> None:
    rows = [line for line in (ROOT / "docs" / "wires.md").read_text().splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 10
    for row in rows:
        run_by = row.rstrip("| ").rpartition("|")[2].strip()
        assert run_by == "no test yet" or re.search(r"\]\(\.\./tests/[\w/]+\.py\)", run_by), row


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", ["README.md", "docs/cpu.md"])
def test_every_page_says_the_same_of_the_first_compilation(page: str) -> None:
    assert COMPILE_TIME in " ".join((ROOT / page).read_text().split())
