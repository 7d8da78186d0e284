"""Model `everbatch`: JSON in, JSON out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from backend.api import EngineConfig, FinishReason, InvalidRequest, PerfMetrics, Request, Result, Unsupported
from backend.api.config.schema import LoraSection, PromptAdaptersSection, TritonConfig
from backend.api.response import PromptLogProb, TopLogProb
from backend.api.tensor import TensorData
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.everbatch import EVERBATCH
from backend.serving.wires.front import TextTools
from backend.serving.work import RowOutput, Work
from tests.serving.fake_triton import Tensor

DEFAULTS = EngineConfig()


def work(
    tools: TextTools, max_kv_tokens: int = 0, config: EngineConfig = DEFAULTS, max_seq_len: int = 64, **fields: Any
) -> Work:
    text = fields.pop("raw", None) or json.dumps(fields)
    tensor = Tensor("request", np.array([text.encode()], dtype=object))
    batch = Batch.read(EVERBATCH.tensors, [tensor], 64)
    info = ModelInfo("m", tools.tokenizer.vocab_size, max_seq_len, eos_ids=(3,))
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
    assert set(work(tools, prompt="a", stop_token_ids=[9]).request.end_ids) == {9, *plain.end_ids}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "none of them is given"),
        ({"prompt": "a", "messages": []}, "messages and prompt is given"),
        ({"prompt": ""}, "the prompt holds no token"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens is -1, the least is 0"),
        ({"prompt": "a", "temperature": "hot"}, r"request\.temperature: expected `float \| null`, got `str`"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias holds the key 'x'"),
        ({"prompt": "a", "logit_bias": {"1" * 5000: 1}}, "logit_bias holds the key '1{40}', token ids are expected"),
        ({"prompt": "a", "logit_bias": {"1_0": 1}}, "logit_bias holds the key '1_0'"),
        ({"prompt_token_ids": [5] * 64}, "64 tokens, the limit is 63"),
        ({"prompt_token_ids": [5, -1]}, "prompt token -1 is outside the vocabulary"),
        ({"prompt_token_ids": [5, 1 << 40], "echo": True}, "prompt token 1099511627776 is outside the vocabulary"),
        ({"raw": "[" * 5000}, "not valid JSON"),
        ({"raw": "[1]"}, "request: expected `object`, got `array`"),
        ({"prompt": "a", "stop": ["s" * 5000]}, "stop has 5000 bytes"),
        ({"prompt": "a" * 30_000}, "bytes, the limit is"),
        (
            {"prompt": "a", "guide": {"type": "xml"}},
            r"^request\.guide\.type: invalid enum value 'xml'; allowed are json, json_schema, regex, ebnf_grammar, struct",
        ),
        (
            {"prompt": "a", "tell_prompt": "a" * 5000},
            r"^request\.tell_prompt: invalid enum value 'a{64}\.\.\.'.{0,40}$",
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
    output = work(tools, prompt="a", stream=True, seed=1).output
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


@pytest.mark.parametrize(
    ("fields", "takes_long"),
    [
        ({"max_tokens": 40, "logprobs": 20, "n": 8}, True),
        ({"max_tokens": 40, "logprobs": 20, "n": 8, "stream": True}, False),
        ({"max_tokens": 40, "logprobs": 20}, False),
        ({"max_tokens": 40, "n": 128}, False),
        ({"max_tokens": 40, "logprobs": 0, "n": 128}, True),
        ({"max_tokens": 4, "logprobs": 20, "n": 8}, False),
        ({"prompt": "a " * 2000, "prompt_logprobs": 20, "max_tokens": 0, "stream": True}, True),
        ({"prompt": "a " * 20, "prompt_logprobs": 20, "max_tokens": 0}, False),
    ],
)
def test_a_response_of_many_log_probs_is_known_to_take_long(
    tools: TextTools, fields: dict[str, Any], takes_long: bool
) -> None:
    assert work(tools, **{"prompt": "a", "max_seq_len": 8192, **fields}).takes_long == takes_long


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


def test_a_prompt_is_scored_token_by_token(tools: TextTools) -> None:
    """lm-eval's form: nothing, or one token, is generated, and the prompt's own tokens are told with the most likely ones."""
    text = "x = é!"
    ids = tools.tokenizer.encode(text)
    asked = work(tools, prompt=text, max_tokens=0, echo=True, prompt_logprobs=1)
    request = asked.request
    assert isinstance(request, Request)
    assert (request.max_tokens, request.output_config.prompt_log_probs) == (0, 1)
    asked.output.feed(result([], FinishReason.LENGTH, prompt_log_probs=scores(ids)))
    last = told(asked.output)
    assert (last["text"], last["token_ids"], last["finish_reason"]) == (text, [], "length")
    assert last["usage"]["completion_tokens"] == 0
    found = last["prompt_logprobs"]
    assert [one["token_id"] for one in found] == ids
    assert [one["logprob"] for one in found] == [None, *(-float(i) for i in range(1, len(ids)))]
    assert found[0]["top"] == [] and [one["token_id"] for one in found[1]["top"]] == [ids[-1]]
    assert bytes(byte for one in found for byte in one["bytes"]).decode() == text
    assert "".join(one["token"] for one in found) == text


def scores(ids: list[int]) -> list[PromptLogProb]:
    return [PromptLogProb(-float(i), 1, [TopLogProb(ids[-1], -0.5)]) for i in range(1, len(ids))]


@pytest.mark.parametrize("each_token", [True, False])
def test_each_sequence_of_a_stream_begins_with_the_scores_of_the_prompt(tools: TextTools, each_token: bool) -> None:
    """The engine tells them with the first sequence only, whose first token may have no text yet."""
    config = EngineConfig(triton=TritonConfig(one_response_per_token=each_token))
    half = tools.tokenizer.encode("🌍", add_special_tokens=False)[:1]
    x = tools.tokenizer.encode("x", add_special_tokens=False)
    output = work(tools, config=config, prompt="a b", n=2, stream=True, prompt_logprobs=0, max_tokens=3).output
    ids = tools.tokenizer.encode("a b")
    output.feed(result(half, prompt_log_probs=scores(ids)))
    output.feed(result(x, sequence_index=1))
    found = [json.loads(dict(arrays)["response"][0]) for arrays in output.render()]
    assert [(one["index"], [entry["token_id"] for entry in one["prompt_logprobs"]]) for one in found] == [
        (0, ids),
        (1, ids),
    ]
    output.feed(result(x, sequence_index=1))
    assert "prompt_logprobs" not in told(output)


@pytest.mark.parametrize("what", ["counts", "token_ids"])
def test_each_sequence_begins_with_what_is_known_of_the_prompt(what: str, tools: TextTools) -> None:
    x = tools.tokenizer.encode("x", add_special_tokens=False)
    output = work(tools, prompt_token_ids=[5, 6, 7], n=2, stream=True, tell_prompt=what, max_tokens=3).output
    output.feed(result(x, perf_metrics=PerfMetrics(num_cached_tokens=2)))
    output.feed(result(x, sequence_index=1))
    found = [json.loads(dict(arrays)["response"][0]) for arrays in output.render()]
    ids = {"token_ids": [5, 6, 7]} if what == "token_ids" else {}
    prompts = [(one["index"], one["prompt"]) for one in found]
    assert prompts == [(i, {"prompt_tokens": 3, "cached_tokens": 0 if i else 2, **ids}) for i in range(2)]
    output.feed(result(x))
    assert "prompt" not in told(output)
    with pytest.raises(InvalidRequest, match="tell_prompt"):
        work(tools, prompt="a", tell_prompt="all")


def test_a_prompt_of_one_token_has_one_without_a_score(tools: TextTools) -> None:
    output = work(tools, prompt_token_ids=[5], max_tokens=0, prompt_logprobs=2).output
    output.feed(result([], FinishReason.LENGTH))
    assert [one["logprob"] for one in told(output)["prompt_logprobs"]] == [None]


def test_special_tokens_that_the_prompts_text_does_not_hold_have_no_bytes(tools: TextTools) -> None:
    """So the bytes are the text that `echo` puts in front, and whoever counts them finds each token's place in it."""
    special = min(tools.tokenizer.special_ids)
    name = tools.tokenizer.visible_token(special, skip_special_tokens=False)
    ids = [special, *tools.tokenizer.encode("x = 1", add_special_tokens=False), special]
    for prompt, text in (
        ({"prompt_token_ids": ids}, "x = 1"),
        ({"prompt": f"{name}x = 1{name}"}, f"{name}x = 1{name}"),
    ):
        output = work(tools, **prompt, max_tokens=0, echo=True, prompt_logprobs=0).output
        output.feed(result([], FinishReason.LENGTH, prompt_log_probs=scores(ids)))
        last = told(output)
        assert [one["token_id"] for one in last["prompt_logprobs"]] == ids
        assert bytes(byte for one in last["prompt_logprobs"] for byte in one["bytes"]).decode() == last["text"] == text
        assert last["prompt_logprobs"][0]["token"] == name


def test_special_tokens_are_shown_where_asked_for_but_not_the_one_that_ends_the_output(tools: TextTools) -> None:
    special = min(tools.tokenizer.special_ids)
    name = tools.tokenizer.visible_token(special, skip_special_tokens=False)
    x = tools.tokenizer.encode("x", add_special_tokens=False)
    for skip, text in ((True, "x"), (False, f"{name}x")):
        output = work(tools, prompt="a", skip_special_tokens=skip, stop_token_ids=[special]).output
        output.feed(result([special, *x, special], FinishReason.END_ID))
        assert told(output)["text"] == text


def test_a_chat_is_rendered_as_its_keys_say(tools: TextTools) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "def main("}]

    def prompt(**keys: Any) -> str:
        return tools.tokenizer.decode(work(tools, messages=messages, **keys).request.input_token_ids, False)

    assert prompt().startswith(prompt(add_generation_prompt=False)) and prompt() != prompt(add_generation_prompt=False)
    assert prompt(continue_final_message=True).endswith("def main(")
    with pytest.raises(InvalidRequest, match="^chat_template_kwargs holds messages"):
        prompt(chat_template_kwargs={"messages": []})


def test_a_prompt_may_only_be_tokenised(tools: TextTools) -> None:
    only = work(tools, prompt="x = 1", tokenize=True, max_kv_tokens=48)
    assert only.request is None, "the engine hears nothing of it"
    ids = tools.tokenizer.encode("x = 1")
    usage = {"prompt_tokens": len(ids), "completion_tokens": 0, "cached_tokens": 0}
    expected = {"text": "", "token_ids": ids, "finish_reason": "length", "stop_reason": None, "usage": usage}
    expected["max_model_len"] = 48
    expected |= {"takes_images": False, "capabilities": ["completion", "chat", "tools"]}
    assert told(only.output) == expected


def test_a_prompt_adapter_is_named_and_goes_in_front_of_the_prompt(tools: TextTools, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    save_file({"prompt_embeddings": np.ones((3, 4), np.float32)}, tmp_path / "adapter_model.safetensors")
    config = EngineConfig(prompt_adapters=PromptAdaptersSection((f"soft={tmp_path}", f"gone={tmp_path / 'x'}")))
    plain = work(tools, config=config, prompt="a").request
    request = work(tools, config=config, prompt="a", prompt_adapter_name="soft").request
    first = tools.tokenizer.vocab_size
    assert request.input_token_ids == [first, first + 1, first + 2, *plain.input_token_ids]
    assert request.prompt_embeddings == TensorData("float32", (3, 4), np.ones((3, 4), np.float32).tobytes())
    assert request.max_tokens == plain.max_tokens - 3 and plain.prompt_embeddings is None
    with pytest.raises(Unsupported, match="^prompt_adapter_name is 'other', there are soft, gone; name one of"):
        work(tools, config=config, prompt="a", prompt_adapter_name="other")
    with pytest.raises(Unsupported, match="^prompt adapter 'gone': .*File does not exist"):
        work(tools, config=config, prompt="a", prompt_adapter_name="gone")
    with pytest.raises(Unsupported, match="there are none"):
        work(tools, prompt="a", prompt_adapter_name="soft")


def test_special_tokens_are_shown_where_they_are_named(tools: TextTools) -> None:
    """Tokens 1 and 2 of the default model are special, `x` is none."""
    ids = [1, *tools.tokenizer.encode("x"), 2]
    for visible, expected in (([], "x"), (["<|im_end|>", "no token"], "x<|im_end|>")):
        output = work(tools, prompt="hi", visible_tokens=visible).output
        output.feed(result(ids, FinishReason.LENGTH))
        assert told(output)["text"] == expected
