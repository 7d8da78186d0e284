"""Calls of tools as each family writes them: read out of every output of a corpus, whatever the pieces in which it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.messages import Function
from gateway.parts import Call, Part, PartReader, whole_answer
from gateway.reasoning import found_in as reasoning_found_in
from gateway.tool_formats.harmony import HarmonyReader
from gateway.tool_formats.reader import CallReader
from gateway.tool_formats.table import TOOL_FORMATS, found_in
from tests.gateway.call_texts import FUNCTIONS, WRITERS, cases

Told = tuple[str, list[tuple[str, str]]]


def parts_of(name: str, pieces: Sequence[str]) -> list[Part]:
    reader, found = CallReader(TOOL_FORMATS[name].format, FUNCTIONS), list[Part]()
    for piece in pieces:
        found += reader.push(piece)
    found += reader.flush()
    assert reader.num_calls == sum(isinstance(part, Call) for part in found)
    return found


def told(name: str, pieces: Sequence[str]) -> Told:
    content, _, calls = whole_answer(parts_of(name, pieces))
    return content, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("name", WRITERS)
def test_the_calls_of_whole_outputs_are_those_that_were_written(name: str) -> None:
    whole = [case for case in cases(name) if case.content is not None]
    assert len(whole) > 100
    for text, calls, content in whole:
        found = told(name, [text])
        assert [(function, json.loads(arguments)) for function, arguments in found[1]] == calls, text
        assert found[0].replace("\n", "") == (content or "").replace("\n", ""), text


@pytest.mark.parametrize("name", WRITERS)
def test_every_split_of_every_output_tells_the_same(name: str) -> None:
    """All of them character by character; 20 of them cut in two at each place, too."""
    for number, case in enumerate(cases(name)):
        text = case.text
        expected = told(name, [text])
        assert told(name, list(text)) == expected, text
        for place in range(1, len(text)) if number % 10 == 0 else ():
            assert told(name, [text[:place], text[place:]]) == expected, (place, text)


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_no_call_stays_text_to_the_last_character(name: str) -> None:
    num_without = 0
    for case in cases(name):
        content, calls = told(name, [case.text])
        if not calls:
            assert content == case.text
            num_without += 1
    assert num_without > 5


TEMPLATES = Path(__file__).resolve().parents[1] / "text" / "chat_templates"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("qwen3", ("hermes", "think")),
        ("qwen2_5", ("hermes", "none")),
        ("llama3_1", ("llama", "none")),
        ("mistral_v3", ("mistral", "none")),
        ("deepseek_v3", ("deepseek_v3", "think")),
        ("zephyr", ("hermes", "none")),
    ],
)
def test_the_formats_are_those_that_the_chat_template_shows(file: str, expected: tuple[str, str]) -> None:
    template = (TEMPLATES / f"{file}.jinja").read_text()
    assert (found_in(template), reasoning_found_in(template)) == expected


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "harmony"])
def test_each_format_reads_what_its_own_guide_makes_a_model_write(name: str) -> None:
    """A structure with its schema's simplest values, as a group of two."""
    format = TOOL_FORMATS[name].format
    written = []
    for function in (FUNCTIONS["add"], FUNCTIONS["x"]):
        structure = format.structure(function)
        parts = structure.get("parts", [{"schema": None}])
        values = [simple(part) for part in parts] if "parts" in structure else ['{"text": "hi"}']
        written.append(structure["begin"] + "".join(values) + structure["end"])
    group = format.group
    text = group.begin + group.separator.join(written) + group.end
    if not any(group) and name == "llama":
        text = "; ".join(written)
    assert told(name, [text]) == ("", [("add", '{"text": "hi"}'), ("x", '{"text": "hi"}')])


def simple(part: Any) -> str:
    match part:
        case str():
            return part
        case {"until": end}:
            return f"hi{end}"
        case {"optional": _}:
            return ""
    return '"hi"'


JSON_FORMATS = [name for name in TOOL_FORMATS if TOOL_FORMATS[name].format.is_json]
ADD, GET = '{"name": "add", "arguments": {"text": "}] ```"}}', '{ "arguments" : {"text": 1}, "name": "get-weather" }'
ADDED, GOT = ("add", '{"text": "}] ```"}'), ("get-weather", '{"text": 1}')
WHOLE_ANSWERS = {
    ADD: [ADDED],
    GET: [GOT],
    f"```json\n{ADD}\n```": [ADDED],
    f"\n```\n{GET}```\n\n": [GOT],
    f"[{ADD},\n {GET}]": [ADDED, GOT],
    f"```json\n[{ADD}]\n``` \n": [ADDED],
    f"```json\n{ADD}\n{GET}\n```": [ADDED, GOT],
    '{"name": "add", "parameters": {}}': [("add", "{}")],
}


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize(("text", "calls"), WHOLE_ANSWERS.items())
def test_a_whole_answer_of_objects_that_name_offered_functions_is_calls(
    name: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))):
        content, found = told(name, pieces)
        assert (content.strip(), found) == ("", calls), pieces


@pytest.mark.parametrize("name", [name for name in JSON_FORMATS if name != "llama"])  # whose own calls are such objects
def test_objects_one_behind_the_other_are_calls(name: str) -> None:
    text = f"{ADD}\n{GET}\n"
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))):
        content, found = told(name, pieces)
        assert (content.strip(), found) == ("", [ADDED, GOT]), pieces


# Answers that only begin like calls, with the beginning at which that is known; None: only at the end.
NO_CALLS = {
    '{"answer": 5}': '{"an',
    '{"name": "Bob", "arguments": {}}': '{"name": "B',
    '{"name": "added", "arguments": {}}': '{"name": "adde',
    '{"name": "add", "arguments": {}} is how to call it': '{"name": "add", "arguments": {}} i',
    "```json\n{}\n``` and more": "```json\n{}",
    f"```json\n{ADD}\n```\nThis adds.": f"```json\n{ADD}\n```\nT",
    "```python\nprint()\n```": "```p",
    f"[{ADD}] <tool_call": f"[{ADD}] <",
    "[1, 2]": "[1",
    "[]": "[]",
    '{"name": "add", "arguments": "text"}': '{"name": "add", "arguments": "text"}',
    '{"name": "add"}': '{"name": "add"}',
    f"{ADD}\n[{GET}]": f"{ADD}\n[",
    f"{ADD}\n{{}}": f"{ADD}\n{{}}",
    '{"name": "add", "arguments": {}': None,
    f"```json\n{ADD}": None,
    "`": None,
}


@pytest.mark.parametrize("name", [name for name in JSON_FORMATS if name != "llama"])
@pytest.mark.parametrize(("text", "known"), NO_CALLS.items())
def test_an_answer_that_only_begins_like_a_call_is_text_and_held_no_longer_than_it_may_become_one(
    name: str, text: str, known: str | None
) -> None:
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))):
        assert told(name, pieces) == (text, []), pieces
    reader = CallReader(TOOL_FORMATS[name].format, FUNCTIONS)
    first = next((i for i, character in enumerate(text) if reader.push(character)), None)
    assert (None if first is None else text[: first + 1]) == known


def test_a_call_with_its_marks_is_read_behind_what_only_began_like_one() -> None:
    marked = '<tool_call>{"name": "add", "arguments": {"text": "a"}}</tool_call>'
    for begun in ('{"name": "add" ', ADD, "[", "```json\n{", f"```json\n{ADD}"):
        for pieces in ([begun + marked], list(begun + marked)):
            assert told("hermes", pieces) == (begun, [("add", '{"text": "a"}')])


def test_other_formats_and_answers_of_a_given_form_are_left_as_they_are() -> None:
    for name in ("qwen_tags", "glm", "pythonic"):
        assert told(name, [ADD]) == (ADD, [])
    reader = CallReader(TOOL_FORMATS["hermes"].format, FUNCTIONS, may_be_whole=False)
    assert reader.push(ADD) == [ADD]


HOSTILE: list[Any] = [
    {"properties": {"a": 5}, "required": 7},
    {"properties": [1], "required": ["a"]},
    {"properties": {"a": {"type": "string"}}, "required": {"a": 1}},
    {
        "properties": {"x>": {"$ref": "#/$defs/x"}, "class": True},
        "$defs": {"x": {"type": "integer"}},
        "required": ["x>"],
    },
    {},
]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("parameters", HOSTILE)
def test_any_parameters_make_a_structure(name: str, parameters: Any) -> None:
    structure = TOOL_FORMATS[name].format.structure(Function.model_construct(name="f", parameters=parameters))
    assert structure.keys() >= {"begin", "end"} and json.dumps(structure)


def test_parameters_bring_what_they_refer_to() -> None:
    parts = TOOL_FORMATS["qwen_tags"].format.structure(Function.model_construct(name="f", parameters=HOSTILE[3]))[
        "parts"
    ]
    assert {"schema": {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}} in parts


@pytest.mark.parametrize("name", ["qwen_tags", "glm"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, '"5"', '"5"'),
        ({"type": "string", "enum": ["5", "a"]}, '"5"', "5"),
        ({"type": "string", "const": "5"}, '"5"', "5"),
        ({"type": ["string", "null"]}, '"5"', "5"),
        ({"type": "integer"}, "5", 5),
        (True, '{"a": 1}', {"a": 1}),
    ],
)
def test_a_value_is_written_and_read_as_a_text_or_as_json_by_its_schema(
    name: str, schema: Any, text: str, value: Any
) -> None:
    """The guide has the model write what the reader then takes: a text as it is, and anything else as JSON."""
    format = TOOL_FORMATS[name].format
    function = Function.model_construct(name="f", parameters={"properties": {"a": schema}, "required": ["a"]})
    structure = format.structure(function)
    has_schema = any("schema" in part for part in structure["parts"] if isinstance(part, dict))
    assert has_schema == (value != text), "what is JSON is guided by its schema"
    written = "".join(
        part if isinstance(part, str) else f"{text}{part.get('until', '')}" for part in structure["parts"]
    )
    reader = CallReader(format, {"f": function})
    (call,) = [*reader.push(structure["begin"] + written + structure["end"]), *reader.flush()]
    assert isinstance(call, Call) and json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[(lambda: 1)()]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(**{})]"),
        ("pythonic", "[f(a=b)]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a={1: 2})]"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[" * 100 + "]" * 100),
        ("hermes", '<tool_call>{"name": "f", "arguments": NaN}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": 1e999}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 100 + "1" + "}" * 101 + "</tool_call>"),
        ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
        ("mistral", "[TOOL_CALLS][]"),
        ("llama", '{"name": "f"}'),
    ],
)
def test_what_json_and_the_formats_do_not_know_is_text(name: str, text: str) -> None:
    assert told(name, [text]) == (text, []) and told(name, list(text)) == (text, [])


def test_half_a_surrogate_pair_is_still_json_for_a_client() -> None:
    (_, arguments) = told("hermes", ['<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'])[1][0]
    assert arguments.encode() and json.loads(arguments) == {"a": "\ud800"}


@pytest.mark.parametrize(
    ("make", "begin", "end"),
    [
        (
            lambda: CallReader(TOOL_FORMATS["qwen_tags"].format, {}),
            "<tool_call><function=f><parameter=a>",
            "</parameter></function></tool_call>",
        ),
        (HarmonyReader, "<|channel|>commentary to=functions.f<|message|>", "<|call|>"),
    ],
)
def test_no_depth_of_arguments_ends_the_reply(make: Callable[[], PartReader], begin: str, end: str) -> None:
    """Python reads a level or two more of JSON than it writes, so there are depths at which only the latter fails."""
    limit = sys.getrecursionlimit()
    for depth in range(limit - 200, limit + 10):
        reader, value = make(), "[" * depth + "]" * depth
        found = [*reader.push(begin + value + end), *reader.flush()]
        assert value in "".join(part.arguments if isinstance(part, Call) else str(part) for part in found)
