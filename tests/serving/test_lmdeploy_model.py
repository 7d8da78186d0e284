"""Model `lmdeploy_model`: LMDeploy's Triton Python backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backend.api import EngineConfig, ErrorCode, FinishReason, InvalidRequest, Request, Result
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.front import TextTools
from backend.serving.wires.lmdeploy import LMDEPLOY
from backend.serving.work import RowOutput, Work
from tests.serving.fake_triton import Tensor

REQUIRED = {"max_tokens": 8, "ignore_eos": False, "stream": False}
TYPES = {"temperature": np.float64, "top_p": np.float64, "top_k": np.int32, "repetition_penalty": np.float64}
TYPES |= {"max_tokens": np.int32, "ignore_eos": bool, "stream": bool, "skip_special_tokens": bool}


def work(tools: TextTools, **fields: Any) -> Work:
    values = {"prompt": ["x = 1"], **REQUIRED, **fields}
    tensors = [
        Tensor(
            name,
            np.array([value], TYPES[name]) if name in TYPES else np.array([text.encode() for text in value], object),
        )
        for name, value in values.items()
        if value is not None
    ]
    batch = Batch.read(LMDEPLOY.tensors, tensors, 64)
    context = ServingContext(EngineConfig(), ModelInfo("m", tools.tokenizer.vocab_size, 64, eos_ids=(3,)))
    LMDEPLOY.check(batch, context)
    (only,) = LMDEPLOY.parse(batch, context, Parameters(namespace="mine"), tools)
    return only


def asked(tools: TextTools, **fields: Any) -> Request:
    request = work(tools, **fields).request
    assert isinstance(request, Request)
    return request


def told(output: RowOutput) -> str | None:
    arrays = next(iter(output.render()), None)
    if arrays is None:
        return None
    ((name, array),) = arrays
    assert name == "response" and array.shape == ()
    return array.item().decode()


@pytest.mark.feature("W-08")
def test_a_prompt_is_plain_text_and_its_output_never_echoes_it(tools: TextTools) -> None:
    request = asked(tools, max_tokens=5)
    assert request.input_token_ids == tools.tokenizer.encode("x = 1") and request.max_tokens == 5
    assert request.output_config.exclude_input_from_output and not request.streaming
    assert request.end_ids[0] == 3 and tools.tokenizer.eos_id in request.end_ids and request.cache_salt == "mine"
    assert asked(tools, ignore_eos=True).end_ids == ()


def test_decoding_is_greedy_unless_asked_to_sample_and_then_every_request_has_a_seed(tools: TextTools) -> None:
    assert asked(tools).sampling_config.is_greedy and asked(tools).sampling_config.seed is None
    sampled = asked(tools, temperature=0.8, top_p=0.9, top_k=40, repetition_penalty=1.1).sampling_config
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.repetition_penalty) == (0.8, 0.9, 40, 1.1)
    assert sampled.seed is not None and sampled.seed != asked(tools, temperature=0.8).sampling_config.seed


@pytest.mark.feature("W-08")
def test_a_stream_tells_deltas_and_one_response_all(tools: TextTools) -> None:
    first, second = tools.tokenizer.encode("self, x", add_special_tokens=False)[:2]
    ending = {"is_final": True, "finish_reasons": (FinishReason.LENGTH,)}
    for stream in (True, False):
        output = work(tools, stream=stream).output
        output.feed(Result([[first]]))
        assert told(output) == (tools.tokenizer.decode([first]) if stream else None)
        output.feed(Result([[second]], **ending))
        assert told(output) == tools.tokenizer.decode([second] if stream else [first, second])


def test_stop_words_end_the_text_and_are_not_part_of_it(tools: TextTools) -> None:
    made = work(tools, stop_words=[";", ""], bad_words=["no"])
    assert made.request.streaming and made.request.bad_words
    assert made.output.feed(Result([tools.tokenizer.encode("x;y", add_special_tokens=False)])) is not None
    made.output.feed(Result([[]], is_final=True, finish_reasons=(FinishReason.STOP_WORDS,)))
    assert told(made.output) == "x"


@pytest.mark.parametrize(("skip", "text"), [(None, "a"), (True, "a"), (False, "a<|im_start|>")])
def test_special_tokens_are_shown_on_request_and_the_end_never(tools: TextTools, skip: bool | None, text: str) -> None:
    ids = [*tools.tokenizer.encode("a", add_special_tokens=False), tools.tokenizer.token_to_id("<|im_start|>")]
    output = work(tools, skip_special_tokens=skip).output
    output.feed(Result([[*ids, tools.tokenizer.eos_id]], is_final=True, finish_reasons=(FinishReason.END_ID,)))
    assert told(output) == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ["a", "b"]}, "prompt holds 2 entries, the limit is 1"),
        ({"prompt": [""]}, "prompt holds no token"),
        ({"prompt": ["x = 1\n" * 40]}, "the limit is 63"),
        ({"max_tokens": 0}, "max_tokens is 0, at least 1"),
        ({"ignore_eos": None}, "A value is required for ignore_eos"),
        ({"stop_words": ["s" * 5000]}, "stop_words has 5000 bytes"),
    ],
)
def test_what_is_wrong_is_named(tools: TextTools, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        work(tools, **fields)


def test_errors_begin_with_lmdeploys_words() -> None:
    assert LMDEPLOY.dialect.error_text(ErrorCode.INTERNAL, "x") == "[INTERNAL] Error when processing request: x"
