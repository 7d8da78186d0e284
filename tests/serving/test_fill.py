"""The key `fill` of the model `everbatch`."""

from __future__ import annotations

from typing import Any

import pytest

from backend.api import InvalidRequest, Unsupported
from backend.serving.wires.front import TextTools
from backend.text.fim import FORMS, FimWriter
from tests.serving.test_everbatch_model import result, told, work
from tests.text.test_fim import letters

FILL = {"prefix": "a(", "suffix": ")b"}


@pytest.fixture
def filling(tools: TextTools) -> TextTools:
    """Tools whose tokenizer has Qwen's tokens."""
    tokenizer = letters(*FORMS[0].tokens)
    return tools._replace(tokenizer=tokenizer, fim=FimWriter.of(tokenizer))


def test_the_prompt_is_the_models_form_and_its_tokens_end_the_output(filling: TextTools) -> None:
    request = work(filling, fill=FILL).request
    shown = filling.tokenizer.decode(request.input_token_ids, skip_special_tokens=False)
    assert shown.replace(" ", "") == "<|fim_prefix|>a(<|fim_suffix|>)b<|fim_middle|>"
    assert filling.tokenizer.token_to_id("<|file_sep|>") in request.end_ids
    ignoring = work(filling, fill=FILL, ignore_eos=True).request
    assert ignoring.end_ids == ()


def test_files_leave_room_for_the_middle(filling: TextTools) -> None:
    files = [{"text": "x" * 40, "path": "a"}, {"text": "y" * 40}]
    request = work(filling, fill={**FILL, "files": files}, max_tokens=10, max_seq_len=100).request
    assert len(request.input_token_ids) <= 90
    assert told_prompt(filling, {**FILL, "files": files}, 100) == 1
    assert told_prompt(filling, {**FILL, "files": files}, 1000) is None


def told_prompt(tools: TextTools, fill: dict[str, Any], max_seq_len: int) -> int | None:
    """How many files the first response says to have been left out."""

    output = work(tools, fill=fill, max_tokens=10, max_seq_len=max_seq_len, stream=True, tell_prompt="counts").output
    output.feed(result([5]))
    found: int | None = told(output)["prompt"].get("files_left_out")
    return found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fill": {**FILL, "prefix": "a" * 64}}, "the limit is 63"),
        ({"fill": {**FILL, "files": [{"text": ""}] * 1025}}, "1025 entries, the limit is 1024"),
        ({"fill": {**FILL, "files": [{"text": "", "path": "p" * 4097}]}}, "more than 4096 characters"),
        ({"fill": FILL, "prompt": "a"}, "prompt and fill is given"),
        ({"fill": FILL, "echo": True}, "echo cannot be had with fill"),
        ({"fill": FILL, "prompt_logprobs": 1}, "prompt_logprobs cannot be had with fill"),
        ({"fill": {"prefix": "a"}}, "request.fill: object missing required field `suffix`"),
    ],
)
def test_a_fill_that_cannot_be_is_refused(fields: dict[str, Any], message: str, filling: TextTools) -> None:
    with pytest.raises(InvalidRequest, match=message):
        work(filling, **fields)


def test_a_model_without_the_tokens_says_which_models_have_them(tools: TextTools) -> None:
    with pytest.raises(
        Unsupported, match=r"no tokens for filling in the middle; send the prompt alone, or serve .*Qwen"
    ):
        work(tools, fill=FILL)


def test_a_model_tells_its_capabilities(tools: TextTools, filling: TextTools) -> None:
    def told_by(asked: TextTools) -> Any:
        return told(work(asked, prompt_token_ids=[5], tokenize=True).output)["capabilities"]

    assert told_by(tools) == ["completion", "chat", "tools"]
    assert told_by(filling) == ["completion", "chat", "tools", "fim"]
