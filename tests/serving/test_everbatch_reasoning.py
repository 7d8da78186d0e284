"""Reasoning on the wire of model `everbatch`: what the engine has to know of it, and how it is counted."""

from __future__ import annotations

from typing import Any

import pytest

from backend.api import FinishReason, InvalidRequest
from backend.serving.wires.front import TextTools
from tests.serving.test_everbatch_model import result, told, work


def test_reasoning_is_the_engine_s_business_where_something_depends_on_it(tools: TextTools) -> None:
    marks = {"start": "<|im_start|>", "end": "<|im_end|>", "follow": "x"}
    follow = tuple(tools.tokenizer.encode("x"))
    assert work(tools, prompt="a", reasoning=marks).request.thinking is None
    for fields in ({"guide": {"type": "json"}}, {"reasoning": {**marks, "max_tokens": 3}}):
        thinking = work(tools, prompt="a", **{"reasoning": marks, **fields}).request.thinking
        assert thinking is not None and (thinking.start_ids, thinking.end_ids) == ((1,), (2,))
        assert thinking.follow_ids == follow and thinking.max_tokens == (None if "guide" in fields else 3)


def test_reasoning_that_the_prompt_has_begun_begins_the_text_and_is_counted(tools: TextTools) -> None:
    """The prompt ends with the mark, as chat templates of models write it that always think."""
    marks = {"start": "<|im_start|>", "end": "<|im_end|>", "max_tokens": 9}
    x = tools.tokenizer.encode("x")
    for prompt, ids, text, count in (
        ("a<|im_start|>\n", [*x, 2, *x], "<|im_start|>x<|im_end|>x", 2),
        ("a", [1, *x, 2, *x], "<|im_start|>x<|im_end|>x", 3),
        ("a", [*x, 2, *x], "x<|im_end|>x", 0),
        ("a<|im_start|>", [*x, *x], "<|im_start|>xx", 2),
    ):
        asked = work(tools, prompt=prompt, reasoning=marks, visible_tokens=["<|im_start|>", "<|im_end|>"])
        assert asked.request.thinking is not None
        assert asked.request.thinking.start_ids == (() if prompt != "a" else (1,))
        asked.output.feed(result(ids, FinishReason.LENGTH))
        reply = told(asked.output)
        assert reply["text"] == text and reply["usage"]["reasoning_tokens"] == count


def test_a_prompt_that_has_closed_the_reasoning_has_none_behind_it(tools: TextTools) -> None:
    """As Qwen's template writes it for enable_thinking false."""
    marks = {"start": "<|im_start|>", "end": "<|im_end|>", "max_tokens": 9}
    asked = work(tools, prompt="a<|im_start|>\n\n<|im_end|>\n\n", reasoning=marks)
    assert asked.request.thinking is None
    asked.output.feed(result(tools.tokenizer.encode("x"), FinishReason.LENGTH))
    assert "reasoning_tokens" not in told(asked.output)["usage"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reasoning": {"start": "", "end": "x"}}, r"reasoning\.start has 0 characters, allowed is 1 to 256"),
        ({"reasoning": {"start": "x", "end": "x" * 257}}, r"reasoning\.end has 257 characters, allowed is 1 to 256"),
        ({"reasoning": {"start": "x", "end": "x", "max_tokens": -1}}, r"reasoning\.max_tokens is -1, allowed is 0 to"),
        ({"visible_tokens": ["x"] * 65}, "visible_tokens has 65 entries, the limit is 64"),
        ({"visible_tokens": ["x" * 257]}, "visible_tokens has an entry of more than 256 characters"),
    ],
)
def test_marks_have_limits(tools: TextTools, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        work(tools, prompt="a", **fields)
