"""The table of parameters in docs/openai.md against what the endpoints do: no name is missing, and no cell is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from backend.api.sampling import PLAIN
from gateway import translate
from gateway.dialect import Dialect
from gateway.errors import GatewayError
from gateway.invalid import parse, refused_of
from gateway.items import items_of
from gateway.messages import ChatRequest, CompletionRequest, Sampling
from gateway.response_messages import ResponseRequest
from gateway.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai.md"
KINDS: dict[str, type[Sampling]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponseRequest,
}
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "chat": {"model": "everbatch", "messages": MESSAGES, "seed": 1},
    "completions": {"model": "everbatch", "prompt": "hi", "seed": 1},
    "responses": {"model": "everbatch", "input": "hi", "seed": 1},
}
SEEN_LATER = {  # nothing that the model is asked for; other tests show what they do
    *(("stream_options.include_usage", endpoint) for endpoint in ("chat", "completions")),
    *((name, kind) for name in ("include_reasoning", "separate_reasoning") for kind in ("chat", "responses")),
    *(("store", "responses"), ("previous_response_id", "responses"), ("conversation", "responses")),
}
DIALECT = Dialect.of(Settings(reasoning_format="think"))
TOOLS = [{"type": "function", "function": {"name": "f"}}]
OWN_TOOLS = [{"type": "function", "name": "f"}]  # as /v1/responses writes them
WITH: dict[str, dict[str, Any]] = {
    "parallel_tool_calls": {"tools": TOOLS},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": TOOLS},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
}
# A value of each parameter that asks for something, in OpenAI's API or vLLM's.
VALUES: dict[str, Any] = {
    **dict.fromkeys(("length_penalty", "temperature", "top_p", "presence_penalty", "frequency_penalty"), 0.5),
    **dict.fromkeys(
        ("top_k", "min_tokens", "n", "max_tokens", "max_completion_tokens", "min_new_tokens", "max_output_tokens"), 2
    ),
    **dict.fromkeys(("seed", "best_of", "prompt_logprobs", "top_logprobs"), 3),
    **dict.fromkeys(("stream", "echo", "ignore_eos", "include_stop_str_in_output", "store", "background"), True),
    **dict.fromkeys(("use_beam_search", "early_stopping", "return_token_ids"), True),
    **dict.fromkeys(("user", "instructions", "suffix", "conversation"), "x"),
    **dict.fromkeys(("reasoning_effort", "verbosity"), "low"),
    **dict.fromkeys(("no_stop_trim", "return_hidden_states", "continue_final_message"), True),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), False),
    **dict.fromkeys(("include_reasoning", "separate_reasoning"), False),
    "chat_template_kwargs": {"enable_thinking": False},
    "enable_thinking": False,
    **dict.fromkeys(("thinking_budget", "thinking_token_budget", "max_reasoning_tokens"), 7),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_grammar"), "[]"),
    "guided_choice": ["a", "b"],
    **{field.name: field.plain for field in PLAIN},
    "logit_bias": {"5": 1},
    "stop": list("abcde"),
    "stop_token_ids": [5],
    "bad_words": ["a"],
    "stream_options.include_usage": True,
    "stream_options.continuous_usage_stats": True,
    "thinking": {"type": "disabled"},
    "include": ["message.output_text.logprobs"],
    "logprobs": {"chat": True, "completions": 2},
    "previous_response_id": "resp_0",
    "metadata": {"a": "b"},
    "kwargs": {"a": "b"},
    "parallel_tool_calls": False,
    "service_tier": "priority",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"json_object": True},
    "text": {"format": {"type": "json_object"}},
    "tools": {"chat": TOOLS, "completions": TOOLS, "responses": OWN_TOOLS},
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "v", "format": "wav"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "reasoning": {"effort": "low"},
    "truncation": "auto",
    "prompt": {"id": "p"},
}


def table() -> dict[str, dict[str, str]]:
    """For each name and endpoint what the cell begins with: required, yes, no effect, refused or -."""
    lines = PAGE.read_text().partition("| parameter |")[2].partition("\n\n")[0].splitlines()[2:]
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        names, *cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        words = [re.split("[,;:]", cell)[0] for cell in cells]
        assert set(words) <= {"required", "yes", "no effect", "refused", "-"}, line
        for name in re.findall("`([a-z_.]+)`", re.sub(r"\(.*?\)", "", names)):
            assert name not in rows, f"{name} stands in two rows"
            rows[name] = dict(zip(KINDS, words, strict=True))
    return rows


TABLE = table()
CELLS = [(name, endpoint, word) for name, cells in TABLE.items() for endpoint, word in cells.items()]


def fields(endpoint: str) -> set[str]:
    """Its parameters; of stream_options those in it."""
    names = set(KINDS[endpoint].model_fields) - {"stream_options"}
    return names | {"stream_options.include_usage", "stream_options.continuous_usage_stats"}


@pytest.mark.parametrize("endpoint", KINDS)
def test_every_parameter_is_in_the_table_and_only_those_that_are_known(endpoint: str) -> None:
    known = fields(endpoint) | set(refused_of(KINDS[endpoint]))
    assert {name for name, cells in TABLE.items() if cells[endpoint] != "-"} == known


def jobs(endpoint: str, added: dict[str, Any]) -> list[dict[str, Any]]:
    """What the model is asked for."""
    message: Any = parse(KINDS[endpoint], json.dumps({**GOOD[endpoint], **added}).encode())[0]
    if endpoint == "responses":
        return [translate.response(message, [], items_of(message.input), DIALECT)]
    return [translate.chat(message, DIALECT)] if endpoint == "chat" else translate.completions(message)


def beside(endpoint: str, name: str) -> dict[str, Any]:
    """What a parameter needs besides."""
    wanted = WITH.get(name.partition(".")[0], {})
    if name in ("tool_choice", "parallel_tool_calls") and endpoint == "responses":
        return {"tools": OWN_TOOLS}
    return {key: value for key, value in wanted.items() if key in KINDS[endpoint].model_fields}


def asking(endpoint: str, name: str) -> dict[str, Any]:
    value = VALUES[name]
    own, _, inner = name.partition(".")
    if name in ("logprobs", "tools"):
        value = value[endpoint]
    return {own: {inner: value}} if inner else {own: value}


@pytest.mark.parametrize(("name", "endpoint", "word"), [cell for cell in CELLS if cell[2] != "-"])
def test_a_parameter_does_what_its_cell_says(name: str, endpoint: str, word: str) -> None:
    field = KINDS[endpoint].model_fields.get(name)
    assert (word == "required") == (field is not None and field.is_required())
    if word == "required":
        return
    base = beside(endpoint, name)
    added = {**base, **asking(endpoint, name)}
    if word == "refused":
        with pytest.raises(GatewayError) as caught:
            jobs(endpoint, added)
        assert caught.value.status == 400 and (caught.value.param or "").startswith(name)
    elif (name, endpoint) in SEEN_LATER:
        assert word == "yes" and jobs(endpoint, added) == jobs(endpoint, base)
    else:
        assert (jobs(endpoint, added) == jobs(endpoint, base)) == (word == "no effect")
