"""The example of docs/lmdeploy.md, as a reader would run it."""

from __future__ import annotations

from tests.docs.pages import examples, printed_by


def test_the_example_runs() -> None:
    (program,) = examples("lmdeploy.md")
    printed = printed_by(program)
    assert "import os" in printed and len(printed.splitlines()) >= 3
