"""Model `vllm`: the wire of Triton's vLLM backend."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from backend.api import EngineConfig, FinishReason, InvalidRequest, Result, Unsupported
from backend.api.guide import Guide, GuideType
from backend.api.response import TopLogProb
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.front import TextTools
from backend.serving.wires.vllm import CANCELLED, FLAGS, VLLM, Cancelled, error_text
from backend.serving.work import RowOutput, Work
from tests.serving.fake_triton import Tensor

pytestmark = pytest.mark.feature("W-07")
MAX_SEQ_LEN = 64


def tensors(text: str = "def main(", sampling: Any = None, **inputs: Any) -> dict[str, np.ndarray]:
    """Rank-1 inputs; `sampling` is sent as the tensor `sampling_parameters`."""
    if sampling is not None:
        inputs["sampling_parameters"] = sampling if isinstance(sampling, str) else json.dumps(sampling)
    return {
        name: np.array([value]) if isinstance(value, bool) else np.array([value.encode()], dtype=object)
        for name, value in {"text_input": text, **inputs}.items()
    }


def work(tools: TextTools, parameters: dict[str, Any] | None = None, max_kv_tokens: int = 0, **inputs: Any) -> Work:
    batch = Batch.read(VLLM.tensors, [Tensor(*item) for item in tensors(**inputs).items()], 64)
    info = ModelInfo("m", tools.tokenizer.vocab_size, MAX_SEQ_LEN, eos_ids=(3,))
    context = ServingContext(EngineConfig(), info, max_kv_tokens=max_kv_tokens)
    VLLM.check(batch, context)
    (only,) = VLLM.parse(batch, context, Parameters(namespace="mine", others=parameters or {}), tools)
    return only


def told(output: RowOutput) -> dict[str, Any] | None:
    """What a response says, by output; every output has one element."""
    arrays = next(iter(output.render()), None)
    if arrays is None:
        return None
    assert all(array.shape == (1,) for _, array in arrays)
    return {name: array[0].decode() if array.dtype == object else array[0] for name, array in arrays}


def result(ids: list[int], reason: FinishReason = FinishReason.NOT_FINISHED, **fields: Any) -> Result:
    return Result([ids], is_final=reason is not FinishReason.NOT_FINISHED, finish_reasons=(reason,), **fields)


def ids_of(tools: TextTools, text: str) -> list[int]:
    return tools.tokenizer.encode(text, add_special_tokens=False)


# ---- sampling parameters ---------------------------------------------------------------------------------------------


def test_without_parameters_vllms_defaults_hold(tools: TextTools) -> None:
    request = work(tools).request
    assert request.max_tokens == 16 and not request.streaming and request.cache_salt == "mine"
    assert request.sampling_config.temperature == 1.0 and request.sampling_config.seed is not None
    assert 3 in request.end_ids and not request.output_config.return_log_probs


ASKED = {
    "temperature": "0.5",
    "top_p": "0.9",
    "top_k": "7",
    "min_p": "0.1",
    "seed": "11",
    "max_tokens": "9",
    "min_tokens": "2",
    "ignore_eos": "true",
    "presence_penalty": "0.25",
    "frequency_penalty": "0.5",
    "repetition_penalty": "1.5",
}


@pytest.mark.parametrize("as_tensor", [True, False])
def test_values_may_be_strings_in_the_tensor_and_in_the_requests_parameters(tools: TextTools, as_tensor: bool) -> None:
    request = work(tools, **({"sampling": ASKED} if as_tensor else {"parameters": ASKED})).request
    config = request.sampling_config
    assert (config.temperature, config.top_p, config.top_k, config.min_p, config.seed) == (0.5, 0.9, 7, 0.1, 11)
    assert (config.presence_penalty, config.frequency_penalty, config.repetition_penalty) == (0.25, 0.5, 1.5)
    assert (request.max_tokens, config.min_tokens, request.end_ids) == (9, 2, ())


def test_the_tensor_wins_over_the_requests_parameters(tools: TextTools) -> None:
    assert work(tools, parameters={"max_tokens": 3}, sampling={"max_tokens": 5}).request.max_tokens == 5
    assert work(tools, parameters={"max_tokens": 3}, sampling="").request.max_tokens == 3


def test_an_output_ends_where_the_model_or_the_pool_ends(tools: TextTools) -> None:
    num_prompt = len(tools.tokenizer.encode("def main("))
    assert work(tools, sampling={"max_tokens": 1500}).request.max_tokens == MAX_SEQ_LEN - num_prompt
    assert work(tools, sampling={"max_tokens": None}).request.max_tokens == MAX_SEQ_LEN - num_prompt
    assert work(tools, sampling={"max_tokens": 1500}, max_kv_tokens=32).request.max_tokens == 32 - num_prompt


def test_of_a_prompt_the_last_tokens_are_taken_and_the_whole_text_is_told(tools: TextTools) -> None:
    long = "x " * 200
    request, output, _ = work(tools, text=long, sampling={"truncate_prompt_tokens": "5", "max_tokens": 3})
    assert request.input_token_ids == tools.tokenizer.encode(long)[-5:] and request.max_tokens == 3
    output.feed(result(ids_of(tools, "y"), FinishReason.LENGTH))
    assert told(output) == {"text_output": long + "y"}


def test_what_asks_for_nothing_is_accepted(tools: TextTools) -> None:
    neutral = {"n": "1", "best_of": 1, "use_beam_search": "False", "length_penalty": 1, "early_stopping": False}
    more = {"detokenize": True, "guided_decoding": None, "structured_outputs": "", "prompt_logprobs": None, "seed": -1}
    request = work(tools, sampling={**neutral, **more, "spaces_between_special_tokens": False}, image="").request
    assert request.sampling_config.seed >= 0, "-1 asks for a random one"


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"prompt_logprobs": 1}, "log-probabilities of the prompt"),
        ({"detokenize": False}, "detokenize is False"),
        ({"allowed_token_ids": [1]}, "a list of allowed tokens"),
        ({"lora_name": "doll"}, r"^LoRA feature is not enabled\.$"),
        ({"tempersture": 0}, ": 'tempersture' is no known parameter, did you mean temperature; leave out what"),
        ({"max_output_tokens": 9}, "'max_output_tokens' is no known parameter, did you mean max_tokens; leave"),
        (
            {"guided_json": "{}", "skip_special_token": 1},
            "'guided_json' .*; 'skip_special_token' .*did you mean skip_special_t",
        ),
    ],
)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_what_is_not_built_is_refused_by_name(
    tools: TextTools, sampling: dict[str, Any], message: str, as_tensor: bool
) -> None:
    with pytest.raises(Unsupported, match=message):
        work(tools, **({"sampling": sampling} if as_tensor else {"parameters": sampling}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sampling": {"temperature": "hot"}},
            r"sampling_parameters\.temperature: expected `float \| null`, got `str`",
        ),
        ({"parameters": {"max_tokens": "x"}}, r"the request's parameters\.max_tokens: expected `int"),
        ({"sampling": "{"}, "sampling_parameters is not valid JSON"),
        ({"sampling": "[1]"}, "sampling_parameters: expected `object`, got `array`"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens is 0, at least 1"),
        ({"sampling": {"max_tokens": 4, "min_tokens": 5}}, "min_tokens is 5, the limit is max_tokens, which is 4"),
        ({"sampling": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens is 0, at least 1"),
        ({"sampling": {"logprobs": 21}}, "logprobs is 21, allowed is 0 to 20"),
        ({"sampling": {"logprobs": -1}}, "logprobs is -1, allowed is 0 to 20"),
        ({"sampling": {"stop": ["s" * 5000]}}, "stop has 5000 bytes"),
        ({"text": ""}, "text_input is empty"),
        ({"text": "x " * 200}, "tokens, the limit is 63"),
        ({"text": "a" * 5000}, "text_input has 5000 bytes, the limit is 4096"),
        ({"image": "aGk="}, "the model reads text only"),
        ({"embedding_request": '{"input": "a"}'}, "embedding_request asks for an embedding"),
    ],
)
def test_what_is_wrong_is_named(tools: TextTools, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        work(tools, **fields)


# ---- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("exclude", "echoes"), [(None, True), (False, True), (True, False)])
def test_without_streaming_the_prompt_comes_first_unless_it_is_excluded(
    tools: TextTools, exclude: bool | None, echoes: bool
) -> None:
    output = work(tools, **({} if exclude is None else {"exclude_input_in_output": exclude})).output
    output.feed(result(ids_of(tools, "x y"), FinishReason.LENGTH))
    assert told(output) == {"text_output": "def main(x y" if echoes else "x y"}


def test_a_stream_that_must_not_exclude_the_prompt_is_refused_in_vllms_words(tools: TextTools) -> None:
    with pytest.raises(InvalidRequest) as caught:
        work(tools, stream=True, exclude_input_in_output=False)
    assert error_text(caught.value.code, caught.value.message) == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )
    output = work(tools, stream=True, exclude_input_in_output=True).output
    output.feed(result(ids_of(tools, "x")))
    assert told(output) == {"text_output": "x"}


def test_the_flags_hold_for_every_response_and_tell_of_its_own_tokens(tools: TextTools) -> None:
    output = work(tools, stream=True, sampling={"temperature": 0}, **dict.fromkeys(FLAGS, True)).output
    first, second, third = ids_of(tools, "a b c")
    num_prompt = len(tools.tokenizer.encode("def main("))
    output.feed(result([first], log_probs=[[-0.5]]))
    assert told(output) == {
        "text_output": "a",
        "finish_reason": "None",
        "cumulative_logprob": -0.5,
        "logprobs": "null",
        "num_input_tokens": num_prompt,
        "num_output_tokens": 1,
    }
    output.feed(result([second, third], FinishReason.LENGTH, log_probs=[[-0.25, -1.0]]))
    arrays = dict(*output.render())
    assert arrays["finish_reason"].tolist() == [b"length"] and arrays["cumulative_logprob"].tolist() == [-1.75]
    assert arrays["num_output_tokens"].tolist() == [2]
    types = {name: array.dtype for name, array in arrays.items()}
    assert types["num_input_tokens"] == types["num_output_tokens"] == np.uint32
    assert types["cumulative_logprob"] == np.float32


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_brings_its_own_output_and_no_other(tools: TextTools, flag: str) -> None:
    output = work(tools, **{flag: True}).output
    output.feed(result([5], FinishReason.LENGTH, log_probs=[[-0.5]]))
    assert set(told(output) or {}) == {"text_output", flag.removeprefix("return_")}


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FinishReason.LENGTH, "length"),
        (FinishReason.END_ID, "stop"),
        (FinishReason.STOP_WORDS, "stop"),
        (FinishReason.TIMED_OUT, "abort"),
        (FinishReason.CANCELLED, "abort"),
    ],
)
def test_the_end_is_told_by_vllms_names(tools: TextTools, reason: FinishReason, name: str) -> None:
    output = work(tools, return_finish_reason=True).output
    output.feed(result([5], reason))
    assert (told(output) or {})["finish_reason"] == name


def test_a_cancelled_stream_ends_with_an_error_and_a_cancelled_answer_with_what_there_is(tools: TextTools) -> None:
    stream = work(tools, stream=True).output
    stream.feed(result([], FinishReason.CANCELLED))
    with pytest.raises(Cancelled, match=f"^{CANCELLED}$"):
        stream.render()
    answer = work(tools, exclude_input_in_output=True).output
    answer.feed(result(ids_of(tools, "x"), FinishReason.CANCELLED))
    assert told(answer) == {"text_output": "x"}


# ---- stops and tokens ------------------------------------------------------------------------------------------------


def test_each_step_of_a_stream_is_told_though_its_text_is_held_back(tools: TextTools) -> None:
    output = work(tools, stream=True, sampling={"stop": "qqq"}, return_num_output_tokens=True).output
    (q,) = ids_of(tools, "q")
    for _ in range(2):
        output.feed(result([q]))
        assert told(output) == {"text_output": "", "num_output_tokens": 1}
    output.feed(result([*ids_of(tools, "z")], FinishReason.LENGTH))
    assert told(output) == {"text_output": "qqz", "num_output_tokens": 1}


@pytest.mark.parametrize(("include", "text"), [("false", ""), ("true", "qq")])
def test_the_response_that_ends_by_a_stop_string_has_the_token_that_completed_it(
    tools: TextTools, include: str, text: str
) -> None:
    sampling = {"stop": "qq", "include_stop_str_in_output": include}
    output = work(
        tools, stream=True, sampling=sampling, return_num_output_tokens=True, return_finish_reason=True
    ).output
    (q,) = ids_of(tools, "q")
    output.feed(result([q]))
    assert told(output) == {"text_output": "", "finish_reason": "None", "num_output_tokens": 1}
    assert output.feed(result([q])) == 2, "the engine is to be stopped"
    assert told(output) is None, "the end is not known yet"
    output.feed(result([q]))  # the engine had gone on
    output.feed(result([], FinishReason.CANCELLED))
    assert told(output) == {"text_output": text, "finish_reason": "stop", "num_output_tokens": 1}


def test_a_token_that_only_shows_the_stop_string_is_told_too(tools: TextTools) -> None:
    """The tokenizer holds half a character back, so its end of the text is known one token later."""
    half, other = ids_of(tools, "é")[0], ids_of(tools, "x")[0]
    output = work(tools, stream=True, sampling={"stop": "\ufffd"}, return_num_output_tokens=True).output
    output.feed(result([half]))
    assert told(output) == {"text_output": "", "num_output_tokens": 1}
    assert output.feed(result([other])) == 1, "the session would keep the first token only"
    output.feed(result([], FinishReason.CANCELLED))
    assert told(output) == {"text_output": "", "num_output_tokens": 1}


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "x;")])
def test_a_stop_token_is_shown_only_when_asked(tools: TextTools, include: bool, text: str) -> None:
    (semicolon,), (x,) = ids_of(tools, ";"), ids_of(tools, "x")
    sampling = {"stop_token_ids": [semicolon], "include_stop_str_in_output": include}
    output = work(tools, sampling=sampling, exclude_input_in_output=True, return_num_output_tokens=True).output
    output.feed(result([x, semicolon], FinishReason.END_ID))
    assert told(output) == {"text_output": text, "num_output_tokens": 2}


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_skipped_unless_told_otherwise(tools: TextTools, skip: bool) -> None:
    special = min(tools.tokenizer.special_ids)
    name = tools.tokenizer.visible_token(special, skip_special_tokens=False)
    output = work(
        tools, sampling={"skip_special_tokens": skip, "ignore_eos": True}, exclude_input_in_output=True
    ).output
    output.feed(result([*ids_of(tools, "x"), special, *ids_of(tools, "y")], FinishReason.LENGTH))
    assert told(output) == {"text_output": "xy" if skip else f"x{name}y"}


# ---- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("text", [" the é!", "a �é"])
def test_the_tokens_of_rank_1_are_the_text_of_each_response(tools: TextTools, num_top: int, text: str) -> None:
    sampling = {"temperature": 0, "logprobs": str(num_top)}
    output = work(tools, stream=True, sampling=sampling, return_logprobs=True).output
    ids = ids_of(tools, text)[:-1] + ids_of(tools, "é")[:1]  # ends with half a character
    for n, token_id in enumerate(ids):
        is_last = n == len(ids) - 1
        top = [TopLogProb(token_id, -0.5), TopLogProb(7, -1.5)]
        reason = FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED
        output.feed(result([token_id], reason, log_probs=[[-0.5]], top_log_probs=[top]))
        response = told(output) or {}
        (position,) = json.loads(response["logprobs"])
        assert len(position) == max(num_top, 1)
        best = {key: value for key, value in position.items() if value["rank"] == 1}
        assert best == {str(token_id): {"logprob": -0.5, "rank": 1, "decoded_token": response["text_output"]}}


def test_a_sampled_token_that_is_not_among_the_most_likely_is_told_besides_with_its_rank(tools: TextTools) -> None:
    request, output, _ = work(tools, sampling={"logprobs": 1}, return_logprobs=True)
    assert request.output_config.top_log_probs == 20, "to find its rank"
    top = [TopLogProb(5, -0.5), TopLogProb(6, -1.0), TopLogProb(7, -2.0)]
    far = [TopLogProb(5, -0.5), TopLogProb(6, float("-inf"))]
    output.feed(result([7, 9], FinishReason.LENGTH, log_probs=[[-2.0, float("-inf")]], top_log_probs=[top, far]))
    first, second = json.loads((told(output) or {})["logprobs"])
    assert {key: (value["rank"], value["logprob"]) for key, value in first.items()} == {"5": (1, -0.5), "7": (3, -2.0)}
    assert {key: (value["rank"], value["logprob"]) for key, value in second.items()} == {
        "5": (1, -0.5),
        "9": (3, -9999),
    }


def test_the_engine_is_asked_for_log_probabilities_only_where_they_are_told(tools: TextTools) -> None:
    def asked(**inputs: Any) -> tuple[bool, int]:
        config = work(tools, **inputs).request.output_config
        return config.return_log_probs, config.top_log_probs

    greedy = {"temperature": 0, "logprobs": 2}
    assert asked(sampling=greedy) == (False, 0)
    assert asked(sampling=greedy, return_logprobs=True) == (True, 2)
    assert asked(sampling=greedy | {"logprobs": 0}, return_logprobs=True) == (True, 1)
    assert asked(return_logprobs=True) == (False, 0)
    assert asked(sampling={"temperature": 0, "logprobs": True}, return_logprobs=True) == (True, 1)
    assert asked(sampling={"temperature": 0, "logprobs": False}, return_logprobs=True) == (False, 0)
    assert asked(return_cumulative_logprob=True) == (True, 0)


@pytest.mark.parametrize(
    ("given", "guide"),
    [
        ('{"json": {"type": "object"}}', Guide(GuideType.JSON_SCHEMA, '{"type": "object"}')),
        ('{"json": "{}"}', Guide(GuideType.JSON_SCHEMA, "{}")),
        ({"regex": "a+"}, Guide(GuideType.REGEX, "a+")),
        ({"choice": ["a.b", "c"]}, Guide(GuideType.REGEX, r"a\.b|c")),
        ({"grammar": "start: x"}, Guide(GuideType.EBNF_GRAMMAR, "start: x")),
        ({"json_object": True}, Guide(GuideType.JSON)),
        ("{}", None),
    ],
)
@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_structured_outputs_are_guides(tools: TextTools, name: str, given: Any, guide: Guide | None) -> None:
    assert work(tools, sampling={name: given}).request.guide == guide


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"structured_outputs": "{"}, "structured_outputs is not valid JSON"),
        ({"structured_outputs": {"jsn": "{}"}}, "the key 'jsn', allowed are json, regex"),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "json and regex, one of them"),
        ({"structured_outputs": {"regex": 5}}, "regex is a int, text is expected"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}, "whitespace_pattern is not served"),
        ({"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "b"}}, "mean the same"),
    ],
)
def test_structured_outputs_of_another_form_are_refused(tools: TextTools, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        work(tools, sampling=given)
