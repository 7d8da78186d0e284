"""Model `everbatch`: JSON in, JSON out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from backend.api import EngineConfig, FinishReason, InvalidRequest, PerfMetrics, Result, Unsupported
from backend.api.config import LoraSection
from backend.api.response import TopLogProb
from backend.core.step import ModelInfo
from backend.serving.fronts.everbatch import EVERBATCH
from backend.serving.fronts.front import TextTools
from backend.serving.outputs import RowOutput
from backend.serving.reading import Batch
from backend.serving.requests import Parameters, ServingContext, Work
from tests.serving.fake_triton import Tensor
from tests.serving.test_text_requests import MODEL_DIRECTORY

DEFAULTS = EngineConfig()


@pytest.fixture(scope="module")
def tools() -> TextTools:
    return TextTools.from_directory(str(MODEL_DIRECTORY))


def work(tools: TextTools, max_kv_tokens: int = 0, config: EngineConfig = DEFAULTS, **fields: Any) -> Work:
    text = fields.pop("raw", None) or json.dumps(fields)
    tensor = Tensor("request", np.array([text.encode()], dtype=object))
    batch = Batch.read(EVERBATCH.tensors, [tensor], 64)
    info = ModelInfo("m", tools.tokenizer.vocab_size, 64, eos_ids=(3,))
    context = ServingContext(config, info, max_kv_tokens=max_kv_tokens, adapters=config.lora.directories)
    EVERBATCH.check(batch, context)
    (only,) = EVERBATCH.parse(batch, context, Parameters(namespace="mine"), tools)
    return only


def told(output: RowOutput) -> Any:
    arrays = next(iter(output.render()), None)
    return None if arrays is None else json.loads(dict(arrays)["response"][0])


def result(ids: list[int], reason: FinishReason = FinishReason.NOT_FINISHED, **fields: Any) -> Result:
    return Result([ids], is_final=reason is not FinishReason.NOT_FINISHED, finish_reasons=(reason,), **fields)


def test_a_prompt_is_text_or_ids_or_messages(tools: TextTools) -> None:
    assert work(tools, prompt="x = 1").request.input_token_ids == tools.tokenizer.encode("x = 1")
    assert work(tools, prompt_token_ids=[5, 6]).request.input_token_ids == [5, 6]
    messages = [{"role": "user", "content": "hi"}]
    rendered = tools.template.render(messages)
    expected = tools.tokenizer.encode(rendered, add_special_tokens=False)
    assert work(tools, messages=messages).request.input_token_ids == expected


def test_without_max_tokens_the_output_is_as_long_as_fits(tools: TextTools) -> None:
    assert work(tools, prompt_token_ids=[5] * 10).request.max_tokens == 54
    assert work(tools, max_kv_tokens=32, prompt_token_ids=[5] * 10).request.max_tokens == 22
    assert work(tools, prompt_token_ids=[5], max_tokens=7).request.max_tokens == 7


def test_sampling_follows_vllms_defaults_and_names(tools: TextTools) -> None:
    plain = work(tools, prompt="a").request
    assert plain.sampling_config.temperature == 1.0 and plain.sampling_config.seed is not None
    assert plain.sampling_config.seed != work(tools, prompt="a").request.sampling_config.seed
    assert plain.cache_salt == "mine"
    asked = work(tools, prompt="a", temperature=0, top_k=-1, logit_bias={"5": 2.5}, stop_token_ids=[9], ignore_eos=True)
    assert asked.request.sampling_config.is_greedy and asked.request.sampling_config.seed is None
    assert asked.request.sampling_config.logit_bias == {5: 2.5}
    assert asked.request.end_ids == (9,) and 3 in plain.end_ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "none of them is given"),
        ({"prompt": "a", "messages": []}, "messages and prompt is given"),
        ({"prompt": ""}, "the prompt holds no token"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0, at least 1"),
        ({"prompt": "a", "temperature": "hot"}, r"request\.temperature: expected `float \| null`, got `str`"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias holds the key 'x'"),
        ({"prompt_token_ids": [5] * 64}, "64 tokens, the limit is 63"),
        ({"raw": "[" * 5000}, "not valid JSON"),
        ({"raw": "[1]"}, "request: expected `object`, got `array`"),
        ({"prompt": "a", "stop": ["s" * 5000]}, "stop has 5000 bytes"),
        ({"prompt": "a" * 30_000}, "bytes, the limit is"),
        (
            {"prompt": "a", "guide": {"type": "xml"}},
            r"^request\.guide\.type: invalid enum value 'xml'; allowed are json, json_schema, regex, ebnf_grammar, struct",
        ),
        (
            {"prompt": "a", "guide": {"type": "choice"}},
            r"structural_tag; a choice is a regex red\|green, or a json_schema",
        ),
        ({"prompt": "a", "guide": "json"}, r"^request\.guide: expected `object .*got `str`; its keys are type, text$"),
        ({"prompt": "a", "guide": {"schema": {}}}, r"^request\.guide: object .* field `.*`; its keys are type, text$"),
        ({"prompt": "a", "guide": {"type": "json", "text": 5}}, r"^request\.guide\.text: expected `str`, got `int`$"),
    ],
)
def test_what_is_wrong_is_named(tools: TextTools, fields: dict[str, Any], message: str) -> None:
    if fields == {}:
        fields = {"raw": "{}"}
    with pytest.raises(InvalidRequest, match=message):
        work(tools, **fields)


def test_an_unknown_field_is_refused_by_name(tools: TextTools) -> None:
    with pytest.raises(
        Unsupported,
        match="^request: 'guided_json' is no known parameter, did you mean guide; 'x' is no known parameter; leave",
    ):
        work(tools, prompt="a", x=2, guided_json="{}")


def test_an_adapter_is_named_as_the_configuration_has_it(tools: TextTools) -> None:
    config = EngineConfig(lora=LoraSection(enabled=True, adapters=("doll=/loras/doll",)))
    lora = work(tools, config=config, prompt="a", lora_name="doll").request.lora
    assert lora is not None and lora.path == "/loras/doll"
    assert work(tools, config=config, prompt="a").request.lora is None
    assert lora.shown == "'doll'", "errors name it as its client does"
    with pytest.raises(Unsupported, match=r"^lora_name is 'cow', there are doll; name one of them"):
        work(tools, config=config, prompt="a", lora_name="cow")
    for without in (EngineConfig(), EngineConfig(lora=LoraSection(enabled=True))):
        with pytest.raises(Unsupported, match=r"^lora_name is 'doll', .*; start the server with --lora doll=DIRECTORY"):
            work(tools, config=without, prompt="a", lora_name="doll")


def test_a_stream_tells_deltas_and_its_end_the_usage(tools: TextTools) -> None:
    output = work(tools, prompt="a", stream=True).output
    first, second = tools.tokenizer.encode("x y", add_special_tokens=False)[:2]
    output.feed(result([first]))
    assert told(output) == {"text": tools.tokenizer.decode([first]), "token_ids": [first]}
    assert told(output) is None
    output.feed(result([second], FinishReason.LENGTH, perf_metrics=PerfMetrics(num_cached_tokens=1)))
    last = told(output)
    assert last["token_ids"] == [second] and last["finish_reason"] == "length" and last["stop_reason"] is None
    num_prompt = len(tools.tokenizer.encode("a"))
    assert last["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": 2, "cached_tokens": 1}


def test_a_stop_string_is_named_and_not_part_of_the_text(tools: TextTools) -> None:
    output = work(tools, prompt="a", stop=[";"]).output
    assert output.feed(result(tools.tokenizer.encode("x;y", add_special_tokens=False))) is not None
    output.feed(result([], FinishReason.STOP_WORDS))
    assert (told(output) or {}) | {"token_ids": 0, "usage": 0} == {
        "text": "x",
        "token_ids": 0,
        "finish_reason": "stop",
        "stop_reason": ";",
        "usage": 0,
    }


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "x;")])
def test_a_stop_token_is_told_and_shown_only_when_asked(tools: TextTools, include: bool, text: str) -> None:
    (semicolon,) = tools.tokenizer.encode(";", add_special_tokens=False)
    x = tools.tokenizer.encode("x", add_special_tokens=False)
    output = work(tools, prompt="a", stop_token_ids=[semicolon], include_stop_in_output=include).output
    output.feed(result([*x, semicolon], FinishReason.END_ID))
    last = told(output)
    assert last["text"] == text and last["stop_reason"] == semicolon and last["token_ids"] == [*x, semicolon]


def test_log_probs_come_with_the_text_and_bytes_of_each_token(tools: TextTools) -> None:
    output = work(tools, prompt="a", logprobs=1).output
    ids = tools.tokenizer.encode(" é!", add_special_tokens=False)
    tops = [[TopLogProb(ids[-1], -0.5)] for _ in ids]
    logs = [[-1.0] * len(ids)]
    output.feed(result(ids, FinishReason.LENGTH, log_probs=logs, cum_log_probs=[-1.0], top_log_probs=tops))
    last = told(output)
    assert "".join(entry["token"] for entry in last["logprobs"]) == last["text"] == " é!"
    assert bytes(byte for entry in last["logprobs"] for byte in entry["bytes"]).decode() == " é!"
    assert [entry["token_id"] for entry in last["logprobs"]] == ids
    assert last["logprobs"][0]["top"] == [{"token_id": ids[-1], "token": "!", "bytes": [ord("!")], "logprob": -0.5}]
