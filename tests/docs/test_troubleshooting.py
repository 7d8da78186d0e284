"""docs/troubleshooting.md quotes messages that the sources hold, and no message of the sources is missing there."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from tests.docs import families, messages
from tests.docs.pages import text_of

OURS, _, TRITONS = text_of("troubleshooting.md").partition("\n## Triton's own messages\n")
ROWS_OF_TEXTS, _, REFUSALS = OURS.partition("\n## Refusals that say themselves what to do\n")


def quoted_in(part: str) -> list[str]:
    """The messages in the first column of the tables."""
    cells = re.findall(r"^\| (.*?) \| ", part, re.MULTILINE)
    return [quoted for cell in cells for quoted in re.findall(r"`([^`]+)`", cell)]


QUOTED, ROWS = quoted_in(OURS), quoted_in(ROWS_OF_TEXTS)
MESSAGES = families.all_messages()


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


def test_there_are_messages_to_hold_against_the_page() -> None:
    kinds = Counter(message.kind for message in MESSAGES)
    assert (
        kinds["UserError"] > 60 and kinds["log"] > 70 and kinds["ConfigError"] > 200 and kinds["InvalidRequest"] > 150
    )


def test_each_message_of_what_fails_has_a_row() -> None:
    missing = [str(each) for each in MESSAGES if families.needs_a_row(each) and not families.is_quoted(each.text, ROWS)]
    assert missing == [], "give each a row, or quote it in one, in docs/troubleshooting.md"


def test_each_refusal_belongs_to_a_family_of_the_page() -> None:
    refusals = [each for each in MESSAGES if not families.needs_a_row(each)]
    assert [str(each) for each in refusals if families.family(each) is None] == []
    assert set(re.findall(r"^\| \*\*(.*?)\*\*", REFUSALS, re.MULTILINE)) == set(families.FAMILIES)
    assert {families.family(each) for each in refusals} == set(families.FAMILIES), "a family without a message"


def test_every_kind_of_error_is_on_the_page_or_is_said_to_stay_inside() -> None:
    known = {*families.BY_TEXT, *families.OF_REFUSALS, *families.INTERNAL}
    assert {name: path for name, path in families.exceptions().items() if name not in known} == {}


def test_a_new_message_is_noticed() -> None:
    source = 'raise UserError(f"the moon is {phase}; wait")\nlog.warning("%s howls at it", wolf)\nraise ConfigError("x" * 9)\n'
    source += 'print("warning: a new one")\nraise DragonError("not of the project, so nothing is said of it")\n'
    found = list(families.messages(ast.parse(source), "deploy/new.py"))
    assert sorted((each.kind, families.is_quoted(each.text, ROWS)) for each in found) == [
        ("UserError", False),
        ("console", False),
        ("log", False),
    ]
    refusal = families.Message("elsewhere/new.py", 1, "ConfigError", "the moon is full")
    assert families.family(refusal) is None and not families.is_quoted("anything: at all", ["...", "...: ..."])
