"""The README tells the truth where a machine can check it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels.cpu.build import COMPILE_TIME
from tools import write_config_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_configuration_table_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    fresh = write_config_table.PART.replaced(page, write_config_table.table())
    assert fresh == page, "run python -m tools.write_config_table"


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "backend/README.md", "models/default/README.md"]
PAGES += [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


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
