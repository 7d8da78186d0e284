"""Guides through a real server: TensorRT-LLM's inputs over gRPC and HTTP, and the OpenAI-compatible endpoint before it.

Answers are judged by other parsers: json, jsonschema, re, lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import lark
import openai
import pytest

from tests.e2e.wire import TokenClient, events, post
from tests.guided.tools import tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
# The default model writes Python, so that it opens a bracket soon.
TAG = {
    "type": "structural_tag",
    "triggers": ["("],
    "structures": [{"begin": "(", "schema": {"enum": ["red", 7]}, "end": ")"}],
}
SUMS = """
root ::= num ("+" num)?
num ::= [0-9] | "(" root ")"
"""
SUMS_IN_LARK = """
start: num ("+" num)?
num: /[0-9]/ | "(" start ")"
"""
MAX_TOKENS = 200


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def satisfies(text: str) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))


def matches(text: str) -> bool:
    return re.fullmatch("[xyz]{4}-[0-9]+", text) is not None


def is_derived(text: str) -> bool:
    return bool(lark.Lark(SUMS_IN_LARK, parser="earley").parse(text))


def has_the_structures(text: str) -> bool:
    """Of a text that may be cut anywhere: what follows a bracket begins one of the structures, or is the text's last."""
    pieces = text.split("(")[1:]
    return bool(pieces) and all(
        re.match(r'("red"|7)\)', piece) or (piece is pieces[-1] and len(piece) < 6) for piece in pieces
    )


Judge = Callable[[str], bool]
GUIDES: dict[str, tuple[str, Judge]] = {
    "json": ("", is_object),
    "json_schema": (json.dumps(SCHEMA), satisfies),
    "regex": ("[xyz]{4}-[0-9]{1,3}", matches),
    "ebnf_grammar": (SUMS, is_derived),
    "structural_tag": (json.dumps(TAG), has_the_structures),
}
# What each library says of a form is looked at in tests/guided/test_grammars.py.
BAD = [
    ("json_schema", '{"type": ', "guide: it is no JSON"),
    ("json_schema", '{"not": {}}', "not"),
    ("regex", "(", "cannot be compiled"),
    ("xml", "<a/>", "guided_decoding_guide_type is 'xml', allowed are json, json_schema, regex"),
    ("regex", "", "needs a text"),
]


def guided(kind: str, text: str) -> dict[str, str]:
    """The inputs of TensorRT-LLM's models. An empty text is left out, as clients do."""
    return {"guided_decoding_guide_type": kind} | ({"guided_decoding_guide": text} if text else {})


# ---- TensorRT-LLM's models -------------------------------------------------------------------------------------------


@pytest.mark.feature("000-44", "000-45", "000-46", "000-47")
@pytest.mark.parametrize("kind", GUIDES)
def test_the_tensor_model_s_answers_have_the_form_streamed_and_whole(
    kind: str, server: Any, tokens: TokenClient
) -> None:
    """Four seeds each, at once: of a form that can go on for ever one must end at least."""
    text, judge = GUIDES[kind]
    prompt = tokenizer().encode("def main(")
    sampled = [{"temperature": 1.0, "runtime_top_p": 0.95, "seed": seed} for seed in range(4)]
    asked = {**guided(kind, text), "exclude_input_in_output": True}
    streams = [tokens.start(prompt, MAX_TOKENS, streaming=True, **asked, **each) for each in sampled]
    whole = [tokens.start(prompt, MAX_TOKENS, **asked, **each) for each in sampled]
    found = [stream.token_ids() for stream in streams]
    assert [stream.token_ids() for stream in whole] == found
    ended = [tokenizer().decode(ids) for ids in found if kind == "structural_tag" or len(ids) < MAX_TOKENS]
    assert ended and [text for text in ended if not judge(text)] == []


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("kind", GUIDES)
def test_the_text_models_answers_have_the_form_streamed_and_whole(kind: str, model: str, server: Any) -> None:
    text, judge = GUIDES[kind]
    body = {"text_input": "def main(", "max_tokens": MAX_TOKENS, "exclude_input_in_output": True, **guided(kind, text)}
    body |= {"temperature": 1.0, "top_p": 0.95, "seed": 3, "stream": True}
    status, answer = post(f"{server.http_url}/v2/models/{model}/generate_stream", body)
    assert status == 200, answer
    streamed = "".join(event["text_output"] for event in events(answer))
    status, answer = post(f"{server.http_url}/v2/models/{model}/generate", body | {"stream": False})
    assert status == 200 and json.loads(answer)["text_output"] == streamed
    assert judge(streamed)


def test_the_tensor_model_s_answer_over_http_has_the_form(server: Any) -> None:
    body = {"input_ids": tokenizer().encode("def main("), "request_output_len": 40, "exclude_input_in_output": True}
    body |= {"input_lengths": len(body["input_ids"]), **guided("regex", GUIDES["regex"][0])}
    status, answer = post(f"{server.http_url}/v2/models/tensorrt_llm/generate", body)
    assert status == 200, answer
    assert matches(tokenizer().decode(json.loads(answer)["output_ids"]))


@pytest.mark.parametrize(("kind", "text", "sentence"), BAD)
def test_a_guide_that_cannot_be_held_is_refused_by_name(
    kind: str, text: str, sentence: str, server: Any, tokens: TokenClient
) -> None:
    """Over gRPC by the model of tensors, over HTTP by those of text; nobody else's guide is touched."""
    assert sentence in tokens.error_of(tokens.start([1, 2, 3], 20, **guided(kind, text)))
    for model in ("ensemble", "tensorrt_llm_bls"):
        body = {"text_input": "def ", "max_tokens": 20, **guided(kind, text)}
        status, answer = post(f"{server.http_url}/v2/models/{model}/generate", body)
        assert 400 <= status <= 500 and sentence in json.loads(answer)["error"]
    assert matches(tokenizer().decode(tokens.generate([1, 2, 3], 20, **guided("regex", GUIDES["regex"][0]))))


def test_a_least_of_one_token_is_allowed_and_more_is_refused(server: Any, tokens: TokenClient) -> None:
    regex = guided("regex", GUIDES["regex"][0])
    assert matches(tokenizer().decode(tokens.generate([1, 2, 3], 20, min_tokens=1, **regex)))
    assert "min_tokens is 2, the limit beside a guide is 1" in tokens.error_of(
        tokens.start([1, 2, 3], 20, min_tokens=2, **regex)
    )


# ---- the OpenAI-compatible endpoint ----------------------------------------------------------------------------------

TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
CHAT: Any = [{"role": "user", "content": "Please."}]
GREEDY: Any = {"model": "everbatch", "messages": CHAT, "temperature": 0, "max_completion_tokens": MAX_TOKENS}


def calls_of(client: openai.OpenAI, stream: bool, **values: Any) -> tuple[str, list[tuple[str, Any]], str | None]:
    """The text, the calls (name, arguments), and why the answer has ended."""
    if not stream:
        (choice,) = client.chat.completions.create(**values).choices
        calls = [call.function for call in choice.message.tool_calls or [] if call.type == "function"]
        said = choice.message.content or ""
        return said, [(call.name, json.loads(call.arguments)) for call in calls], choice.finish_reason
    text, reason, found = "", None, {}
    for chunk in client.chat.completions.create(stream=True, **values):
        (choice,) = chunk.choices
        text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            name, arguments = found.get(call.index, ("", ""))
            found[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    return text, [(name, json.loads(arguments)) for name, arguments in found.values()], reason


def check_call(name: str, arguments: Any) -> None:
    if name == "add":
        jsonschema.validate(arguments, SCHEMA)
    else:
        assert (name, arguments) == ("now", {})


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_form_that_was_asked_for(stream: bool, client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    text, calls, reason = calls_of(client, stream, response_format=form, **GREEDY)
    assert (calls, reason) == ([], "stop") and satisfies(text)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_any_object_where_that_was_asked_for(stream: bool, client: openai.OpenAI) -> None:
    """Of eight seeds, those that come to an end: two at least."""
    values = GREEDY | {"temperature": 1, "response_format": {"type": "json_object"}}
    answers = [calls_of(client, stream, seed=seed, **values) for seed in range(8)]
    ended = [text for text, _, reason in answers if reason == "stop"]
    assert len(ended) >= 2 and all(map(is_object, ended))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"add", "now"}),
        ({"type": "function", "function": {"name": "add"}}, {"add"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
    ],
)
def test_a_call_that_is_asked_for_is_made(choice: Any, names: set[str], stream: bool, client: openai.OpenAI) -> None:
    text, ((name, arguments),), reason = calls_of(client, stream, tools=TOOLS, tool_choice=choice, **GREEDY)
    assert (text, reason) == ("", "tool_calls") and name in names
    check_call(name, arguments)


# Biases that make a model without any training for it write <tool_call>, token by token, and end after the call: a token that
# has been said is divided by the repetition penalty, and the next greatest bias decides.
CALLING = dict(
    zip(
        map(str, [*tokenizer().encode("<tool_call>", add_special_tokens=False), *tokenizer().eos_ids]),
        (100, 90, 80, 70, 60, 50, 40, 40),
    )
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_a_model_that_may_call_makes_a_call_that_has_its_form(choice: Any, stream: bool, client: openai.OpenAI) -> None:
    called = {"logit_bias": CALLING, "extra_body": {"repetition_penalty": 100.0}}
    text, ((name, arguments),), reason = calls_of(client, stream, tools=TOOLS, **called, **choice, **GREEDY)
    assert (len(text) <= 1, reason) == (True, "tool_calls"), "what is free text is not the call's"
    check_call(name, arguments)
    said, calls, _ = calls_of(client, stream, tools=TOOLS, **choice, **(GREEDY | {"max_completion_tokens": 12}))
    assert said and not calls, "and need not make one"


def test_a_schema_that_cannot_be_held_is_a_400_that_names_why(client: openai.OpenAI) -> None:
    schema: Any = {"type": "integr"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    free: Any = {"type": "function", "function": {"name": "free"}}
    of_tool = {"param": "tools[1].function.parameters", "code": "invalid_function_parameters"}
    of_form = {"param": "response_format.json_schema.schema", "code": "invalid_json_schema"}
    for values, expected in (
        ({"response_format": form}, of_form),
        ({"tools": [free, tool], "tool_choice": "required"}, of_tool),
        ({"tools": [free, tool]}, of_tool),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                calls_of(client, stream, **values, **GREEDY)
            assert "integr" in caught.value.message
            assert {"param": caught.value.param, "code": caught.value.code} == expected
