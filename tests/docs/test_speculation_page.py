"""The example of docs/speculation.md runs with the default model."""

from __future__ import annotations

from tests.docs.pages import examples, printed_by


def test_the_example_prints_that_half_of_the_drafts_were_right() -> None:
    (example,) = examples("speculation.md")
    assert printed_by(example) == "0.5\n"
