"""docs/troubleshooting.md quotes messages that the sources hold."""

from __future__ import annotations

import re

import pytest

from tests.docs import messages
from tests.docs.pages import text_of

OURS, _, TRITONS = text_of("troubleshooting.md").partition("\n## Triton's own messages\n")
QUOTED = [
    quoted for cell in re.findall(r"^\| (.*?) \| ", OURS, re.MULTILINE) for quoted in re.findall(r"`([^`]+)`", cell)
]


@pytest.fixture(scope="module")
def sources() -> str:
    return messages.all_texts()


def test_there_are_messages_of_every_kind() -> None:
    assert len(QUOTED) > 40 and TRITONS


@pytest.mark.parametrize("message", QUOTED)
def test_each_message_of_ours_stands_in_the_sources(sources: str, message: str) -> None:
    assert [part for part in messages.fragments(message) if part not in sources] == []


def test_another_message_would_be_noticed(sources: str) -> None:
    assert messages.fragments("port ... on ... is already in use") == ["port ", " is already in use"]
    assert "is already in use by a dragon" not in sources
