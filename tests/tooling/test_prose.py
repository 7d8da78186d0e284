"""Comments, docstrings and pages are read alone (CONTRIBUTING.md, rule 4); the forms that hinder it may only become fewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tooling import prose

BUDGET = 20


def test_no_more_sentences_that_cannot_be_read_alone() -> None:
    found = prose.hits(*prose.sources())
    assert len(found) <= BUDGET, "rewrite some of these:\n" + "\n".join(map(str, found))
    assert len(found) > BUDGET - 25, f"there are only {len(found)} left: lower BUDGET in this file"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Of those that run."""', 1),
        ('"""Sequences that run."""', 0),
        ("x = 1  # what the client is told", 2),
        ("x = 1  # the client is informed", 0),
        ("# nobody reads\n# these lines", 1),
        ("# who is it?", 0),
        ("x = 1  # type: ignore[misc]", 0),
    ],
)
def test_what_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, count: int) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(text + "\n")
    assert len(prose.hits(Path("a.py"))) == count


def test_pages_are_read_without_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("| one | nobody |\n```\nnobody\n```\nNobody knows.\n")
    assert [hit.line for hit in prose.hits(Path("a.md"))] == [1, 5]
