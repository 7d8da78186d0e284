"""Added tokens of published families in guides: a special one is only meant where a structural tag names it, any other one is its
text. What a mask allows, its matcher accepts, in both libraries.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from functools import cache

import pytest

from backend.api.guide import Guide, GuideType, Thinking
from backend.guided.compile_jobs import backend_maker
from backend.guided.protocol import CompiledGuide, GuideBackend, GuideError, Matcher
from backend.guided.thinking import ThinkingMatcher
from gateway.reasoning import REASONING_FORMATS
from gateway.tool_formats.table import TOOL_FORMATS
from tests.guided.families import FAMILIES, Made, made
from tests.guided.test_tool_guides import call_text, tag_of
from tests.guided.tools import allowed

XGRAMMAR = pytest.param(
    "xgrammar",
    marks=pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed"),
)
LIBRARIES = pytest.mark.parametrize("library", ["llguidance", XGRAMMAR])
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@cache
def backend(library: str, family: str) -> GuideBackend:
    return backend_maker(library)(made(family).vocabulary)


def takes(matcher: Matcher, ids: Sequence[int], size: int) -> bool:
    """Whether the masks allow these tokens and the output may end behind them. The matcher accepts what its masks allow."""
    for token_id in ids:
        if token_id not in allowed(matcher, size):
            return False
        assert matcher.accept(token_id), f"the mask allows {token_id} and the matcher refuses it"
    return matcher.is_complete


def check_first_mask(guide: CompiledGuide, of: Made) -> set[int]:
    """Of each added token mask and matcher say the same. Returns those that may come first."""
    ids = {of.id_of(text) for text in (*of.family.special, *of.family.plain) if text != of.family.end}
    first = allowed(guide.matcher(), of.vocabulary.size) & ids
    assert first == {token_id for token_id in ids if guide.matcher().accept(token_id)}
    return first


def literals(text: str) -> list[tuple[Guide, str]]:
    """Guides that hold this text, with an output of each."""
    schema = {"type": "object", "properties": {"a": {"const": text}}, "required": ["a"], "additionalProperties": False}
    string = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    output = json.dumps({"a": text}, ensure_ascii=False)
    return [
        (Guide(GuideType.REGEX, re.escape(text) + "|no"), text),
        (Guide(GuideType.REGEX, f"x{re.escape(text)}[a-z]"), f"x{text}b"),
        (Guide(GuideType.JSON_SCHEMA, json.dumps(schema)), output),
        (Guide(GuideType.JSON_SCHEMA, json.dumps(schema).replace('"const": ', '"enum": ["n", ').replace("}}", "]}}", 1)), output),
        (Guide(GuideType.JSON_SCHEMA, json.dumps(string)), output),
        (Guide(GuideType.EBNF_GRAMMAR, f"root ::= {json.dumps(text, ensure_ascii=False)} | \"no\""), text),
    ]  # fmt: skip


@LIBRARIES
@EACH_FAMILY
def test_an_added_token_in_a_literal_is_its_text_unless_it_is_special(family: str, library: str) -> None:
    """Spelled in ordinary tokens it is always right. The token itself is right too, where it is not special."""
    of = made(family)
    for text in (*of.family.plain[:5], *of.family.special[-2:]):
        for guide, output in literals(text):
            compiled = backend(library, family).compile(guide)
            assert takes(compiled.matcher(), of.spelled(output), of.vocabulary.size), (guide, text)
            as_token = of.tokenizer.encode(output, add_special_tokens=False)
            assert of.id_of(text) in as_token
            is_plain = text in of.family.plain
            assert takes(compiled.matcher(), as_token, of.vocabulary.size) == is_plain, (guide, text)
            assert (of.id_of(text) in check_first_mask(compiled, of)) == (is_plain and output == text)


@LIBRARIES
@EACH_FAMILY
def test_the_calls_of_every_format_can_be_written_in_tokens_and_in_letters(family: str, library: str) -> None:
    of, num_taken = made(family), 0
    for name, row in TOOL_FORMATS.items():
        for auto in (False, True) if row.format.trigger else (False,):
            guide = Guide(GuideType.STRUCTURAL_TAG, json.dumps(tag_of(name, auto)))
            try:
                compiled = backend(library, family).compile(guide)
            except GuideError as error:
                assert library == "xgrammar" and "use guided.backend=llguidance" in str(error)
                continue
            begin, _, end = row.format.group
            call = f"{begin}{call_text(name)}{end}"
            for output in [f"Well, {call}", f"{call} and {call}"] if auto else [call]:
                for plain in (False, True):
                    assert takes(compiled.matcher(), of.written(output, plain), of.vocabulary.size), (
                        name,
                        output,
                        plain,
                    )
                    num_taken += 1
            wrong = of.written(call.replace("add", "sub"), plain=False)
            assert not takes(compiled.matcher(), wrong, of.vocabulary.size), name
            check_first_mask(compiled, of)
    assert num_taken >= (4 if library == "xgrammar" else 60)


@LIBRARIES
@EACH_FAMILY
def test_a_guide_applies_behind_every_mark_of_reasoning(family: str, library: str) -> None:
    of = made(family)
    guide = backend(library, family).compile(Guide(GuideType.REGEX, "<tool_call>[a-z]</tool_call>"))
    for marks in REASONING_FORMATS.values():
        start, end, follow = (
            tuple(of.tokenizer.encode(text, add_special_tokens=False))
            for text in (marks.start, marks.end, marks.follow)
        )
        thinking = Thinking(end, start, follow, marks.is_always)
        for plain in (False, True):
            answer = of.written("<tool_call>x</tool_call>", plain)
            ids = [*start, *of.spelled("hm <tool_call> no"), *end, *follow, *answer]
            assert takes(ThinkingMatcher(thinking, guide.matcher()), ids, of.vocabulary.size), marks
