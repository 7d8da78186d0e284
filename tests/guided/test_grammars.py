"""Regular expressions, grammars and structural tags, beside other parsers: re, lark, and patterns written by hand."""

from __future__ import annotations

import json
import re
import time

import lark
import pytest

from backend.guided.protocol import GuideError
from tests.guided.tools import accepts, allowed, compiled, tokenizer

REGEXES = {
    "[a-c]{2,3}": ["a", "ab", "abc", "abcd", "ad", ""],
    "(foo|bar)+ ?baz": ["foobaz", "barfoo baz", "baz", "foo  baz"],
    r"\d{3}-\d{4}": ["555-1234", "5551234", "555-123"],
    "^a.c$": ["abc", "a\nc", "abcd", "a/c"],
    "(?i)yes|no": ["YES", "no", "yesno", "n"],
    r"[^\"]*\\": ["\\", 'a"\\', "ab\\"],
    "caf\u00e9|\u65e5\u672c+": ["caf\u00e9", "\u65e5\u672c\u672c", "cafe", "\u65e5"],
}


@pytest.mark.feature("000-46")
@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regex_is_that_of_the_whole_output(pattern: str) -> None:
    guide = compiled("regex", pattern)
    verdicts = [re.fullmatch(pattern, text) is not None for text in REGEXES[pattern]]
    assert True in verdicts and False in verdicts
    assert [accepts(guide, text) for text in REGEXES[pattern]] == verdicts


ARITHMETIC = """
root ::= expr
expr ::= term (("+" | "-") term)*
term ::= num | "(" expr ")"
num ::= [0-9]+
"""
ARITHMETIC_IN_LARK = """
start: expr
expr: term (("+" | "-") term)*
term: NUM | "(" expr ")"
NUM: /[0-9]+/
"""


@pytest.mark.feature("000-47")
@pytest.mark.parametrize("grammar", [ARITHMETIC, ARITHMETIC_IN_LARK])
def test_a_grammar_derives_what_a_reference_parser_derives(grammar: str) -> None:
    guide, reference = compiled("ebnf_grammar", grammar), lark.Lark(ARITHMETIC_IN_LARK, parser="earley")

    def derives(text: str) -> bool:
        try:
            reference.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    texts = ["1", "1+2", "(1-2)+34", "((7))", "1+", "(1", "1 + 2", "", "a", "()", "1-(2+(3))"]
    assert {derives(text) for text in texts} == {True, False}
    assert [accepts(guide, text) for text in texts] == [derives(text) for text in texts]


TAG = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
                                        "additionalProperties": False}, "end": "</f>"},
        {"begin": "<f=no>", "schema": {"type": "null"}, "end": "</f>"},
    ],
}  # fmt: skip


def test_a_structural_tag_leaves_text_free_and_binds_what_follows_a_trigger() -> None:
    guide = compiled("structural_tag", json.dumps(TAG))
    for text in ("plain text", 'so: <f=add>{"n": 1}</f> done', "<f=no>null</f>", '<f=no>null</f><f=add>{"n":2}</f>'):
        assert accepts(guide, text), text
    for text in (
        "<f=mul>{}</f>",
        '<f=add>{"n": "x"}</f>',
        '<f=add>{"n": 1}',
        "<f=no>  null</f>",
        '<f=add>{"n":   1}</f>',
    ):
        assert not accepts(guide, text), text


def test_at_most_one_structure_ends_the_output() -> None:
    guide = compiled("structural_tag", json.dumps({**TAG, "at_most_one": True}))
    for text in ("plain text", 'so: <f=add>{"n": 1}</f>', "<f=no>null</f>"):
        assert accepts(guide, text), text
    for text in ('<f=no>null</f><f=add>{"n":2}</f>', "<f=no>null</f> done", "so: <f=mul>{}</f>"):
        assert not accepts(guide, text), text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"at_most_one": 1}, "at_most_one of the structural tag is no bool"),
        ({"triggers": []}, "needs structures and triggers"),
        ({"triggers": ["<g"]}, "no structure begins with"),
        ({"triggers": ["<f=", "<f=a"]}, "is the beginning of another"),
        ({"structures": [{"begin": "x", "schema": {}, "end": ""}]}, "no structure begins with"),
        ({"structures": [{"begin": "<f=", "end": ""}]}, "has not its form"),
        ({"format": {}}, "the key 'format'"),
        ({"type": "tag"}, "has not the form"),
    ],
)
def test_a_structural_tag_of_another_form_is_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(GuideError, match=sentence):
        compiled("structural_tag", json.dumps({**TAG, **change}))


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("regex", "(a", "the regex (a: unclosed group; correct it"),
        ("regex", r"(a)\1", r"the regex (a)\1: backreferences are not supported; correct it"),
        ("regex", "a\\n(", "the regex a\\n(: unclosed group; correct it"),
        ("regex", "(?=a)a", "look-around, including look-ahead and look-behind, is not supported; correct it"),
        ("regex", r"[^\s\S]", "the regex matches no text; correct it"),
        ("ebnf_grammar", "root ::= root", "the grammar derives no text; give its rules an alternative that ends"),
        ("ebnf_grammar", 'root := "a', "1(11): lexer error; it was read as Lark, for it has no ::="),
        ("ebnf_grammar", "start: /a(b/", "at 1(8): the regex a(b: unclosed group; correct it"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]; leave them out'),
        (
            "json_schema",
            '{"type": "integr"}',
            "Invalid type: integr; give null, boolean, integer, number, string, array or object",
        ),
        ("json_schema", '{"format": "phone"}', "Unknown format: phone; leave it out, or use pattern"),
        (
            "json_schema",
            '{"oneOf": [{"type": "integer"}, {"type": "number"}]}',
            "no value fits two of its branches; use anyOf",
        ),
        (
            "json_schema",
            '{"$ref": "http://x/y"}',
            'compiled: $ref "http://x/y": $ref leads within a schema only; put what it names there',
        ),
        (
            "json_schema",
            '{"$ref": "#/$defs/none"}',
            'compiled: $ref "#/$defs/none" leads to nothing; put there what it names, or correct it',
        ),
        ("json_schema", '{"enum": []}', "compiled: enum is empty, which nothing satisfies; give it at least one entry"),
        (
            "json_schema",
            '{"anyOf": []}',
            "compiled: anyOf is empty, which nothing satisfies; give it at least one entry",
        ),
        (
            "json_schema",
            '{"type": "integer", "minimum": 5, "maximum": 4}',
            "compiled: minimum (5) is greater than maximum (4), so nothing satisfies the schema; correct it",
        ),
        (
            "json_schema",
            '{"type": "string", "format": "date", "pattern": "^x"}',
            "pattern and format (or minLength, maxLength) together allow nothing; leave one of them out",
        ),
        (
            "json_schema",
            '{"type": "string", "minLength": "x"}',
            'minLength is "x", a positive integer is needed; correct it',
        ),
    ],
)
def test_an_error_says_why_and_what_to_do(kind: str, text: str, sentence: str) -> None:
    with pytest.raises(GuideError) as caught:
        compiled(kind, text)
    assert str(caught.value).startswith("it cannot be compiled: ") and str(caught.value).endswith(sentence)


# A schema -> what is told of it where it is a part of another.
PARTS: list[tuple[object, str]] = [
    ({"not": {}}, 'Unimplemented keys: ["not"]{}; leave them out'),
    ({"format": "phone"}, "Unknown format: phone{}; leave it out, or use pattern"),
    ({"pattern": "a(b"}, "the pattern a(b{}: unclosed group; correct it"),
    ({"patternProperties": {"a(b": {}}}, "the pattern a(b{}: unclosed group; correct it"),
    ({"type": "integr"}, "Invalid type: integr{}; give null, boolean, integer, number, string, array or object"),
    ({"type": ["integr"]}, "Invalid type: integr{}; give null, boolean, integer, number, string, array or object"),
    (
        {"type": 5},
        "type{} is no text and no list of texts; give null, boolean, integer, number, string, array or object",
    ),
    ({"enum": 5}, "enum{} must be an array; correct it"),
    ({"$ref": "#none"}, '$ref "#none"{} leads to nothing; put there what it names, or correct it'),
    ({"minItems": "1"}, 'minItems{} is "1", a positive integer is needed; correct it'),
    (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "oneOf{} is held only where no value fits two of its branches; use anyOf",
    ),
    ({"$ref": "#/none"}, '$ref "#/none"{} leads to nothing; put there what it names, or correct it'),
    ({"$ref": "http://x/y"}, '$ref "http://x/y"{}: $ref leads within a schema only; put what it names there'),
]


@pytest.mark.parametrize(("part", "sentence"), PARTS)
def test_an_error_of_a_part_of_a_schema_says_where_that_stands(part: object, sentence: str) -> None:
    """A value that looks like the part, as one of `enum` or named as a keyword is, stands ahead of it and is not meant."""
    decoys = {"not": {"enum": [part]}, "pattern": {}, "format": {}, "type": {}, "oneOf": {}, "$ref": {}, "minItems": {}}
    schema = {
        "type": "object",
        "properties": {**decoys, "a b": {"type": "array", "items": {"anyOf": [{"type": "null"}, part]}}},
    }
    place = ' at properties["a b"].items.anyOf[1]'
    with pytest.raises(GuideError) as caught:
        compiled("json_schema", json.dumps(schema))
    assert str(caught.value) == f"it cannot be compiled: {sentence.format(place)}"
    tag = {"triggers": ["<"], "structures": [{"begin": "<", "schema": schema, "end": ">"}]}
    with pytest.raises(GuideError) as caught:
        compiled("structural_tag", json.dumps(tag))
    assert (str(caught.value), caught.value.place) == (
        f"it cannot be compiled: {sentence.format(place)}",
        ".structures[0].schema",
    )


def test_a_grammar_in_neither_form_is_told_how_it_was_read() -> None:
    with pytest.raises(GuideError, match="^it cannot be read: .*; it was read as GBNF, for it has ::=$"):
        compiled("ebnf_grammar", 'root ::= "a')


@pytest.mark.parametrize("change", [{}, {"at_most_one": True}, {"triggers": [], "free_text": False}])
@pytest.mark.parametrize("schema", [{"not": {}}, {"type": "integr"}, {"pattern": "(?=a)"}, 5])
def test_an_error_of_one_structure_says_of_which(change: dict[str, object], schema: object) -> None:
    """The bad schema is put in place of each one in turn; the first structures begin with other triggers than the last."""
    good = [{"begin": f"<{kind}={i}>", "schema": {"type": "null"}, "end": "</>"} for kind in "fg" for i in range(2)]
    for i in range(len(good)):
        structures = [each | {"schema": schema} if at == i else each for at, each in enumerate(good)]
        tag = {"triggers": ["<g=", "<f="], "structures": structures, **change}
        with pytest.raises(GuideError) as caught:
            compiled("structural_tag", json.dumps(tag))
        assert caught.value.place == f".structures[{i}].schema"
        said = str(caught.value)
        assert not re.search(r"at \d", said), "a place in a grammar that nobody wrote"
        assert said.count("compile") == (schema != 5), said


def test_special_tokens_are_no_text() -> None:
    """A regex that allows all characters allows none of the tokens that only a tokenizer writes."""
    matcher = compiled("regex", r"(.|\n)*").matcher()
    special = tokenizer().special_ids
    ends = set(tokenizer().eos_ids)
    assert special and not (allowed(matcher) & (special - ends))


BOMBS = {
    "regex": ["(((((a+)+)+)+)+)+$", "((a{0,1000}){0,1000}){0,1000}", "(a|aa|aaa){5000}", "(x+x+)+y", "(.*a.*b.*c){30}"],
    "ebnf_grammar": ["start: start start | \"a\"", "start: start", "root ::= root root | \"\"", "start: foo", "root ::= [a"],
    "json_schema": [
        json.dumps({"enum": [f"value{i}" for i in range(4000)]}),
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
        json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
        json.dumps({"type": "string", "minLength": 10**6}),
        json.dumps({"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)} | {"d25": {}},
                    "$ref": "#/$defs/d0"}),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in BOMBS.items() for text in texts])
def test_a_hostile_guide_ends_in_an_error_or_goes_on_within_bounds(kind: str, text: str) -> None:
    """Compiling and twenty tokens take seconds at most on any machine (limits count steps, not time), and nothing crashes."""
    started = time.monotonic()
    try:
        matcher = compiled(kind, text).matcher()
    except GuideError as error:
        assert "\n" not in str(error)
    else:
        for _ in range(20):
            following = allowed(matcher) - set(tokenizer().eos_ids)
            if not following or not matcher.accept(min(following)):
                break
    assert time.monotonic() - started < 20
