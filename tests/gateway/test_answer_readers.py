"""Answers with reasoning, in channels or between marks: whatever the pieces in which they come, they tell the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.parts import Part, PartReader, Reasoning, whole_answer
from gateway.reasoning import REASONING_FORMATS, ReasoningReader, WithoutReasoning
from gateway.tool_formats.harmony import HarmonyReader
from gateway.tool_formats.reader import CallReader
from gateway.tool_formats.table import TOOL_FORMATS
from tests.gateway.call_texts import FUNCTIONS

HARMONY = (
    "<|channel|>analysis<|message|>They want 1 < 2.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"text": "<|x|> }"}<|call|>'
    "<|start|>assistant<|channel|>final<|message|>Done"
)
HARMONIES = [
    HARMONY,
    HARMONY.replace('"}', '"'),  # no JSON
    "no channel at all <|channel|>",
    "<|start|>assistant<|channel|>final<|message|>",
    ' to=functions.x<|channel|>commentary json<|message|>{"a": 1}',
    "<|start|>" + "x" * 600 + "<|message|>",
    "<|channel|>analysis<|message|>cut off <|en",
    "<|start|>" + "y" * 600,
]


def read_all(reader: PartReader, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    found = list[Part]()
    for piece in pieces:
        found += reader.push(piece)
    content, reasoning, calls = whole_answer([*found, *reader.flush()])
    return content, reasoning, [(call.name, call.arguments) for call in calls]


def test_channels_are_reasoning_content_and_calls() -> None:
    expected = ("Let me see.Done", "They want 1 < 2.", [("add", '{"text": "<|x|> }"}')])
    assert read_all(HarmonyReader(), [HARMONY]) == expected
    content, _, calls = read_all(HarmonyReader(), [HARMONIES[1]])
    assert calls == [] and '<|message|>{"text": "<|x|> }' in content
    assert read_all(HarmonyReader(), [HARMONIES[2]])[0] == HARMONIES[2]
    assert read_all(HarmonyReader(), [HARMONIES[4]])[2] == [("x", '{"a": 1}')]
    assert read_all(HarmonyReader(), [HARMONIES[5]])[0] == HARMONIES[5]
    assert read_all(HarmonyReader(), [HARMONIES[6]])[1] == "cut off <|en"
    assert read_all(HarmonyReader(), [HARMONIES[7]])[0] == HARMONIES[7]


@pytest.mark.parametrize("end", ["<|end|>", ""])
def test_the_beginning_of_a_message_ends_the_one_before(end: str) -> None:
    """Some models leave the end mark out."""
    call = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}'
    text = f"<|channel|>analysis<|message|>why{end}{call}{end}<|start|>assistant<|channel|>final<|message|>Done"
    for pieces in ([text], list(text)):
        assert read_all(HarmonyReader(), pieces) == ("Done", "why", [("f", '{"n": 1}')])


@pytest.mark.parametrize("closing", ["<|call|>", "<|end|>", "<|return|>", ""])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_each_call_in_channels_has_its_own_arguments(number: int, closing: str) -> None:
    """One that is no JSON among them takes nothing of the next one, and gives it nothing."""
    head = "<|start|>assistant<|channel|>commentary to=functions.f{} <|constrain|>json<|message|>"
    text = "".join(f'{head.format(n)}{{"n": {n}}}{closing}{head.format("x")}{{"x": {n}{closing}' for n in range(number))
    for pieces in ([text], list(text)):
        content, reasoning, calls = read_all(HarmonyReader(), pieces)
        assert calls == [(f"f{n}", f'{{"n": {n}}}') for n in range(number)] and reasoning == ""
        assert content == "".join(f'{head.format("x")}{{"x": {n}' for n in range(number))
    reader = HarmonyReader()
    reader.push(text)
    reader.flush()
    assert reader.num_calls == number


@pytest.mark.parametrize("text", HARMONIES)
def test_channels_are_read_the_same_in_any_pieces(text: str) -> None:
    expected = read_all(HarmonyReader(), [text])
    assert read_all(HarmonyReader(), list(text)) == expected
    for place in range(1, len(text)):
        assert read_all(HarmonyReader(), [text[:place], text[place:]]) == expected


@pytest.mark.parametrize("text", HARMONIES)
def test_without_reasoning_only_the_reasoning_is_left_out(text: str) -> None:
    """Also of an answer that ends within it."""
    content, _, calls = read_all(HarmonyReader(), [text])
    for pieces in ([text], list(text)):
        assert read_all(WithoutReasoning(HarmonyReader()), pieces) == (content, "", calls)


THOUGHTS = {
    "<think>\n1 < 2 </thin\n</think>\n\nYes": ("Yes", "1 < 2 </thin"),
    "\n <think></think>Yes": ("Yes", ""),
    "<think>cut off </thi": ("", "cut off </thi"),
    "no thought </think>": ("no thought </think>", ""),
    "<thin": ("<thin", ""),
    "  ": ("  ", ""),
    "<think>a</think><think>b</think>": ("<think>b</think>", "a"),
    '<think>a <tool_call>{"name": "x", "arguments": {}}</tool_call></think>b': (
        "b",
        'a <tool_call>{"name": "x", "arguments": {}}</tool_call>',
    ),
}


def thinking() -> ReasoningReader:
    return ReasoningReader(REASONING_FORMATS["think"], CallReader(TOOL_FORMATS["hermes"].format, FUNCTIONS))


@pytest.mark.parametrize(("text", "expected"), THOUGHTS.items())
def test_reasoning_is_what_stands_between_its_marks_at_the_beginning(text: str, expected: tuple[str, str]) -> None:
    assert read_all(thinking(), [text]) == (*expected, [])
    assert read_all(thinking(), list(text)) == (*expected, [])
    for place in range(1, len(text)):
        assert read_all(thinking(), [text[:place], text[place:]]) == (*expected, [])
    for pieces in ([text], list(text)):
        assert read_all(WithoutReasoning(thinking()), pieces) == (expected[0], "", [])


def test_reasoning_is_told_as_it_comes() -> None:
    reader = thinking()
    assert reader.push("<think>one") == [Reasoning("one")]
    assert reader.push(" two <") == [Reasoning(" two")]
    assert reader.push("x </") == [Reasoning(" <x")]
    assert reader.push("think> yes") == ["yes"]
