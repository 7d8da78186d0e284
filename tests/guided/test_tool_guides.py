"""The guides of tool formats over a tokenizer that has the marks of all formats as special tokens, and over one that has none."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import tokenizers

from backend.api.guide import Guide, GuideType
from backend.guided.llguidance_backend import LLGuidanceBackend
from backend.guided.protocol import CompiledGuide, GuideError
from backend.guided.structural_tag import parse_structural_tag
from backend.guided.vocabulary import TokenizerInfo, Vocabulary
from backend.text.tokenizer import Tokenizer
from gateway.messages import Function
from gateway.tool_formats.table import TOOL_FORMATS
from tests.guided.tools import MODEL
from tests.guided.tools import backend as plain_backend
from tests.guided.tools import tokenizer as plain_tokenizer

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}, "required": ["text"]}
ADD = Function.model_construct(name="add", parameters={**SCHEMA, "additionalProperties": False})
NOW = Function.model_construct(name="now", parameters=None)
MARKS = sorted({mark for row in TOOL_FORMATS.values() for mark in row.format.special})


@cache
def special() -> tuple[Tokenizer, LLGuidanceBackend]:
    raw = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    raw.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in MARKS])
    made = Tokenizer(raw, {"eos_token": "<|endoftext|>"})
    return made, LLGuidanceBackend(Vocabulary.of(TokenizerInfo.of_tokenizer(made), made.num_ids))


def tag_of(name: str, auto: bool, **further: Any) -> dict[str, Any]:
    """As the gateway makes it."""
    format = TOOL_FORMATS[name].format
    tag: dict[str, Any] = {"type": "structural_tag", "structures": [format.structure(ADD), format.structure(NOW)]}
    if any(format.group):
        tag["group"] = format.group._asdict()
    return tag | ({"triggers": [format.trigger]} if auto else {"free_text": False}) | further


def call_text(name: str, text: str = "hi", n: str | None = None) -> str:
    """A call of `add` in this format."""
    structure = TOOL_FORMATS[name].format.structure(ADD)
    if "schema" in structure:
        further = "" if n is None else f', "n": {n}'
        return f'{structure["begin"]}{{"text": {json.dumps(text)}{further}}}{structure["end"]}'
    words: list[str] = []
    for part in structure["parts"]:
        match part:
            case str():
                words.append(part)
            case {"until": end}:
                words.append(text + end)
            case {"schema": _}:
                words.append(json.dumps(text))
            case {"optional": [begin, {"schema": _}, end]} if n is not None:
                words.append(f"{begin}{n}{end}")
    return "".join([structure["begin"], *words, structure["end"]])


def accepts(tokenizer: Tokenizer, guide: CompiledGuide, text: str) -> bool:
    matcher = guide.matcher()
    taken = all(matcher.accept(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False))
    return taken and matcher.is_complete


@pytest.mark.parametrize("has_marks", [True, False], ids=["marks", "no marks"])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_has_the_form_of_its_format(name: str, has_marks: bool) -> None:
    tokenizer, backend = special() if has_marks else (plain_tokenizer(), plain_backend())
    format = TOOL_FORMATS[name].format
    begin, separator, end = format.group
    for auto in (False, True) if format.trigger else (False,):
        guide = backend.compile(Guide(GuideType.STRUCTURAL_TAG, json.dumps(tag_of(name, auto))))
        one = f"{begin}{call_text(name)}{end}"
        two = f"{begin}{call_text(name)}{separator}{call_text(name, 'ho {')}{end}"
        assert accepts(tokenizer, guide, one)
        assert accepts(tokenizer, guide, f"Well, {two} then") == auto
        assert accepts(tokenizer, guide, "no call") == auto
        assert not accepts(tokenizer, guide, one.replace("add", "sub")), "there is no such function"


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "pythonic"])
def test_arguments_satisfy_their_schema(name: str) -> None:
    tokenizer, backend = special()
    guide = backend.compile(Guide(GuideType.STRUCTURAL_TAG, json.dumps(tag_of(name, False))))
    group = TOOL_FORMATS[name].format.group
    for n, is_right in (("7", True), ('"seven"', False), ("7.5", False)):
        assert accepts(tokenizer, guide, f"{group.begin}{call_text(name, n=n)}{group.end}") == is_right


ROOTS: list[dict[str, Any]] = [
    {"type": "object", "anyOf": [SCHEMA, {"required": ["n"]}]},
    {"type": "object", "allOf": [SCHEMA]},
    {"$ref": "#/$defs/x", "$defs": {"x": SCHEMA}},
    {"type": "object", "properties": [SCHEMA]},
    {
        "type": "object",
        "properties": {"text": {"type": "string"}, **{f"n{i}": {"type": "integer"} for i in range(200)}},
    },
    {"type": "object"},
]


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: ",".join(root))
@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "pythonic"])
def test_arguments_are_possible_whatever_their_schema_looks_like(name: str, root: dict[str, Any]) -> None:
    tokenizer, backend = special()
    format = TOOL_FORMATS[name].format
    structure = format.structure(ADD.model_copy(update={"parameters": root})) | {"hold": "most"}
    tag = {"type": "structural_tag", "structures": [structure], "free_text": False, "group": format.group._asdict()}
    guide = backend.compile(Guide(GuideType.STRUCTURAL_TAG, json.dumps(tag)))
    assert accepts(tokenizer, guide, f"{format.group.begin}{call_text(name)}{format.group.end}")


@pytest.mark.parametrize("name", ["kimi", "deepseek_v31", "mistral", "hermes"])
def test_at_most_one_ends_with_the_first_call(name: str) -> None:
    tokenizer, backend = special()
    guide = backend.compile(Guide(GuideType.STRUCTURAL_TAG, json.dumps(tag_of(name, True, at_most_one=True))))
    begin, separator, end = TOOL_FORMATS[name].format.group
    one = call_text(name)
    assert accepts(tokenizer, guide, f"Well, {begin}{one}{end}")
    assert not accepts(tokenizer, guide, f"Well, {begin}{one}{separator}{one}{end}")
    assert not accepts(tokenizer, guide, f"Well, {begin}{one}{end} then")


def test_a_mark_is_its_token_and_not_its_letters() -> None:
    tokenizer, backend = special()
    guide = backend.compile(Guide(GuideType.STRUCTURAL_TAG, json.dumps(tag_of("mistral", False))))
    mark, (letter,) = tokenizer.token_to_id("[TOOL_CALLS]"), tokenizer.encode("[")
    assert mark is not None and guide.matcher().accept(mark) and not guide.matcher().accept(letter)


@pytest.mark.parametrize(
    ("change", "message", "place"),
    [
        ({"group": {"begin": 5}}, "the group of the structural tag has begin", ""),
        ({"group": {"start": "x"}}, "the group of the structural tag has begin", ""),
        ({"structures": [{"begin": "a", "parts": [5]}]}, "a part of a structure is none of", ".structures[0].parts[0]"),
        ({"structures": [{"begin": "a", "parts": [{"until": ""}]}]}, "is none of", ".structures[0].parts[0]"),
        (
            {"structures": [{"begin": "a", "parts": [{"optional": [{"optional": []}]}]}]},
            "is none of",
            ".structures[0].parts[0].optional[0]",
        ),
        ({"structures": [{"begin": "a", "parts": ["x"] * 513}]}, "more than 512 parts", ".structures[0].parts"),
        ({"structures": [{"begin": "a", "parts": "x"}]}, "parts are a list", ".structures[0].parts"),
        ({"structures": [{"begin": "a", "parts": [], "schema": {}}]}, "has not its form", ""),
    ],
)
def test_another_form_of_a_tag_is_refused(change: dict[str, Any], message: str, place: str) -> None:
    tag = {"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"], **change}
    with pytest.raises(GuideError, match=message) as caught:
        parse_structural_tag(json.dumps(tag))
    assert caught.value.place == place
