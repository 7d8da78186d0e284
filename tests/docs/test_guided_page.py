"""The example of docs/guided-decoding.md, as a reader would run it, and the names in its tables."""

from __future__ import annotations

import re

from backend.api.config.schema import GuidedConfig
from backend.api.guide import GuideType
from tests.docs.pages import examples, printed_by, text_of

PAGE = text_of("guided-decoding.md")


def test_the_example_runs() -> None:
    (example,) = examples("guided-decoding.md")
    assert re.search(r"\{'name': .*'age': \d+\}", printed_by(example))


def test_the_page_names_all_types_and_only_keys_that_there_are() -> None:
    assert [each.value for each in GuideType if f"| `{each.value}` |" not in PAGE] == []
    assert set(re.findall(r"`guided\.([a-z_]+)`", PAGE)) <= set(GuidedConfig.__struct_fields__)
