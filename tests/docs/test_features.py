"""Every feature that docs/features.md promises has a test or a reason why it is open, and never both."""

from __future__ import annotations

from tests import feature_coverage


def test_every_row_has_a_test_or_a_reason_why_it_is_open() -> None:
    names, why = feature_coverage.rows(), feature_coverage.reasons()
    tested = feature_coverage.tested_ids()
    assert len(names) == 306
    assert [feature for feature in names if feature not in tested and feature not in why] == []
    assert [feature for feature in why if feature in tested] == [], "take these out of OPEN"
    assert sorted({*tested, *why} - names.keys()) == [], "docs/features.md has no such rows"
