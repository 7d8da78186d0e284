"""The backend xgrammar: what it compiles, and who serves under its name where it is not installed."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import numpy as np
import pytest

from backend.api.config.schema import GuidedConfig
from backend.api.guide import Guide, GuideType
from backend.guided import setup
from backend.guided.compile_jobs import Materials, backend_maker
from backend.guided.protocol import GuideBackend, GuideError
from backend.guided.vocabulary import Vocabulary
from tests.guided.tools import MODEL, VOCAB, accepts, allowed, info, tokenizer

IS_INSTALLED = importlib.util.find_spec("xgrammar") is not None
needs_xgrammar = pytest.mark.skipif(not IS_INSTALLED, reason="xgrammar (requirements/xgrammar.txt) is not installed")
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)


@pytest.fixture(scope="module")
def backend() -> GuideBackend:
    return backend_maker("xgrammar")(Vocabulary.of(info(), VOCAB))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of libraries that can be found; tests change it."""
    names = {"llguidance", "xgrammar"}
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return (True if name in names else None) if name in ("llguidance", "xgrammar") else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return names


def library(backend: str) -> str:
    """Which library compiles where `guided.backend` is this."""
    made: list[Materials] = []

    class Compiler:
        def __init__(self, config: GuidedConfig, make: Any, process: Any) -> None:
            made.append(make.__self__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "GuideCompiler", Compiler)
        patch.setattr(setup, "CompileProcess", lambda given: given)
        setup.make_guides(GuidedConfig(backend=backend), MODEL, VOCAB, (2,))  # type: ignore[arg-type]
    return made[0].backend


@pytest.mark.feature("000-42")
def test_without_xgrammar_llguidance_serves_under_its_name_and_the_log_says_so(
    installed: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "everbatch.guided"):
        assert library("xgrammar") == "xgrammar" and library("auto") == "llguidance" and not caplog.records
        installed.remove("xgrammar")
        assert library("xgrammar") == "llguidance"
    (record,) = caplog.records
    assert record.getMessage() == (
        "guided.backend is xgrammar, which is not installed: llguidance serves guides in its place; for xgrammar itself run "
        "pip install -r requirements/xgrammar.txt"
    )


@needs_xgrammar
@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("json", "", '{"b": [1, 2]}', "[1]"),
        ("json_schema", SCHEMA, '{"a": 12}', '{"b": 12}'),
        ("regex", "[0-9]{3}-x", "123-x", "12-x"),
        ("ebnf_grammar", 'root ::= "yes" | "no"', "yes", "maybe"),
    ],
)
def test_guides_are_compiled(backend: GuideBackend, kind: str, text: str, right: str, wrong: str) -> None:
    guide = backend.compile(Guide(GuideType(kind), text))
    assert accepts(guide, right) and not accepts(guide, wrong)
    again = backend.load(guide.portable)
    assert accepts(again, right) and not accepts(again, wrong), "as the engine has it from the process that compiles"


@needs_xgrammar
def test_a_structural_tag_is_free_text_until_its_trigger(backend: GuideBackend) -> None:
    tag = (
        '{"type": "structural_tag", "structures": [{"begin": "<f>", "schema": %s, "end": "</f>"}], "triggers": ["<f"]}'
    )
    guide = backend.compile(Guide(GuideType.STRUCTURAL_TAG, tag % SCHEMA))
    assert accepts(guide, 'free <f>{"a": 1}</f>') and not accepts(guide, 'free <f>{"b": 1}</f>')


@needs_xgrammar
def test_the_end_is_the_engines_business_and_tokens_can_be_taken_back(backend: GuideBackend) -> None:
    guide = backend.compile(Guide(GuideType.REGEX, "ab"))
    matcher = guide.matcher()
    first = allowed(matcher)
    ids = tokenizer().encode("ab", add_special_tokens=False)
    assert all(matcher.accept(token_id) for token_id in ids) and matcher.is_complete
    assert not allowed(matcher), "the end ids are left out of masks"
    matcher.rollback(len(ids))
    assert not matcher.is_complete and allowed(matcher) == first
    assert not matcher.accept(tokenizer().encode("z", add_special_tokens=False)[0])


@needs_xgrammar
@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(", "it cannot be compiled"),
        ("ebnf_grammar", "nonsense ::=", "it cannot be compiled"),
        ("json_schema", "{", "JSON"),
    ],
)
def test_a_guide_that_cannot_be_read_is_an_error_of_the_guide(
    backend: GuideBackend, kind: str, text: str, message: str
) -> None:
    with pytest.raises(GuideError, match=message):
        backend.compile(Guide(GuideType(kind), text))


@needs_xgrammar
def test_masks_of_other_rows_are_left_alone(backend: GuideBackend) -> None:
    masks = np.full((2, -(-VOCAB // 32)), -1, dtype=np.int32)
    backend.compile(Guide(GuideType.REGEX, "a")).matcher().fill(masks, 1)
    assert (masks[0] == -1).all() and (masks[1] != -1).any()
