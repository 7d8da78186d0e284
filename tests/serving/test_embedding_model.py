"""Model `embedding`, and the commands of model `everbatch` that generate nothing."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import pytest

from backend.api import (
    EngineConfig,
    FinishReason,
    InvalidRequest,
    PerfMetrics,
    Request,
    Result,
    TensorData,
    Unsupported,
)
from backend.api.checkpoint.pooling import Pooling
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.embedding import EMBEDDING
from backend.serving.wires.everbatch import EVERBATCH
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.vectors import Unfinished
from backend.serving.work import Work
from tests.serving.fake_triton import Tensor

WIDTH = 4


def works(tools: TextTools, front: TextFront, *tensors: Tensor) -> list[Work]:
    batch = Batch.read(front.tensors, tensors, 64)
    info = ModelInfo("m", tools.tokenizer.vocab_size, 32, output_widths={"hidden_states": WIDTH})
    context = ServingContext(EngineConfig(), info)
    front.check(batch, context)
    return front.parse(batch, context, Parameters(7.0, "mine"), tools)


def embeddings(tools: TextTools, **inputs: Any) -> list[Work]:
    types: dict[str, Any] = {"text_input": object, "normalize": bool}
    return works(
        tools,
        EMBEDDING,
        *(Tensor(name, np.array(value, dtype=types.get(name, np.int32))) for name, value in inputs.items()),
    )


def command(tools: TextTools, **keys: Any) -> Work:
    (only,) = works(tools, EVERBATCH, Tensor("request", np.array([json.dumps(keys).encode()], dtype=object)))
    return only


def request_of(work: Work) -> Request:
    assert isinstance(work.request, Request)
    return work.request


def rows(*values: list[float]) -> TensorData:
    return TensorData("float32", (len(values), len(values[0])), np.array(values, np.float32).tobytes())


def result(**tensors: TensorData) -> Result:
    return Result(
        [[]],
        is_final=True,
        finish_reasons=(FinishReason.LENGTH,),
        perf_metrics=PerfMetrics(num_cached_tokens=2),
        **tensors,
    )


def ended(reason: FinishReason) -> Result:
    return Result([[]], is_final=True, finish_reasons=(reason,))


def answer(work: Work, given: Result) -> Any:
    work.output.feed(given)
    (arrays,) = work.output.render()
    return json.loads(dict(arrays)["response"][0])


def test_rows_are_requests_that_generate_nothing_and_are_answered_together(tools: TextTools) -> None:
    first, second = embeddings(tools, text_input=[[b"x = 1"], [b"import os"]], dimensions=[[2], [2]])
    asked = request_of(first)
    assert asked.input_token_ids == tools.tokenizer.encode("x = 1") and asked.max_tokens == 0
    assert (asked.output_config.prompt_hidden_states, asked.timeout_s, asked.cache_salt) == ("last", 7.0, "mine")
    second.output.feed(result(prompt_hidden_states=rows([0, 5, 1, 1])))
    assert second.output.render() == []
    first.output.feed(result(prompt_hidden_states=rows([3, 4, 9, 9])))
    (arrays,) = first.output.render()
    told = dict(arrays)
    np.testing.assert_array_equal(told["embedding"], np.array([[0.6, 0.8], [0, 1]], np.float32))
    assert told["num_input_tokens"].tolist() == [[len(tools.tokenizer.encode(text))] for text in ("x = 1", "import os")]
    assert first.output.render() == [] and first.output.finish is FinishReason.LENGTH


def test_the_checkpoint_says_what_is_pooled_and_the_request_whether_it_is_normalised(tools: TextTools) -> None:
    mean = tools._replace(pooling=Pooling("mean", normalize=False, prompt="Q: "))
    states = rows([1, 2, 3, 4], [3, 2, 1, 4])
    for asked, expected in (({}, [2, 2, 2, 4]), ({"normalize": [[True]]}, np.array([2, 2, 2, 4]) / math.sqrt(28))):
        (work,) = embeddings(mean, text_input=[[b"a"]], **asked)
        assert request_of(work).input_token_ids == tools.tokenizer.encode("Q: a")
        assert request_of(work).output_config.prompt_hidden_states == "all"
        work.output.feed(result(prompt_hidden_states=states))
        np.testing.assert_allclose(dict(work.output.render()[0])["embedding"][0], expected, rtol=1e-6)


def test_ids_are_cut_to_their_length(tools: TextTools) -> None:
    first, second = embeddings(tools, input_ids=[[5, 6, 7], [8, 0, 0]], input_lengths=[[3], [1]])
    assert [request_of(work).input_token_ids for work in (first, second)] == [[5, 6, 7], [8]]


def test_a_vector_of_zeros_stays_one(tools: TextTools) -> None:
    (work,) = embeddings(tools, text_input=[[b"a"]])
    work.output.feed(result(prompt_hidden_states=rows([0, 0, 0, 0])))
    assert dict(work.output.render()[0])["embedding"].tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({}, "the request holds no rows"),
        ({"dimensions": [[3]]}, "exactly one of text_input and input_ids is expected"),
        ({"text_input": [[b"a"]], "input_ids": [[5]]}, "exactly one of text_input and input_ids is expected"),
        ({"text_input": [[b""]]}, "text_input is empty; give at least one character"),
        ({"text_input": [[b"\xff"]]}, "text_input is not valid UTF-8 at byte 0"),
        ({"text_input": [[b"x" * 2049]]}, "text_input has 2049 bytes, the limit is 2048"),
        ({"text_input": [[b"a b " * 40]]}, r"text_input has \d+ tokens, the limit is 32"),
        ({"text_input": [[b"a"]], "dimensions": [[0]]}, "dimensions is 0, allowed is 1 to 4, the model's own"),
        ({"text_input": [[b"a"]], "dimensions": [[5]]}, "dimensions is 5, allowed is 1 to 4, the model's own"),
        ({"text_input": [[b"a"], [b"b"]], "dimensions": [[1], [2]]}, "dimensions differ between the rows"),
        ({"input_ids": [[5, -1]]}, "input_ids has token -1, which is outside the vocabulary"),
        ({"input_ids": [[1 << 30]]}, "input_ids has token 1073741824, which is outside the vocabulary"),
        ({"input_ids": [[5]], "input_lengths": [[2]]}, "input_lengths is 2, allowed is 1 to 1"),
        ({"input_ids": [[5]], "input_lengths": [[0]]}, "input_lengths is 0, allowed is 1 to 1"),
    ],
)
def test_what_cannot_be_embedded_is_named(inputs: dict[str, Any], sentence: str, tools: TextTools) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        embeddings(tools, **inputs)


def test_what_the_checkpoint_forbids_is_told(tools: TextTools) -> None:
    with pytest.raises(
        Unsupported, match="embeddings cannot be made with this model: modules.json: Dense is not served"
    ):
        embeddings(tools._replace(pooling=Pooling(refusal="modules.json: Dense is not served")), text_input=[[b"a"]])
    cut = tools._replace(pooling=Pooling(dimensions=(2,)))
    assert len(embeddings(cut, text_input=[[b"a"]], dimensions=[[2]])) == 1
    with pytest.raises(InvalidRequest, match="dimensions is 3, and config.json allows 2, 4 only; use one of them"):
        embeddings(cut, text_input=[[b"a"]], dimensions=[[3]])


def test_a_text_whose_request_was_ended_has_no_vector(tools: TextTools) -> None:
    (work,) = embeddings(tools, text_input=[[b"a"]])
    work.output.feed(ended(FinishReason.TIMED_OUT))
    with pytest.raises(Unfinished, match="the request was ended before its text was computed"):
        work.output.render()
    told = answer(command(tools, embed="a"), ended(FinishReason.TIMED_OUT))
    assert told["finish_reason"] == "timeout" and "embedding" not in told


def test_the_command_embed_gives_the_same_in_base64(tools: TextTools) -> None:
    work = command(tools, embed="x = 1", dimensions=2, timeout_s=3)
    assert request_of(work).input_token_ids == tools.tokenizer.encode("x = 1") and request_of(work).timeout_s == 3
    told = answer(work, result(prompt_hidden_states=rows([3, 4, 9, 9])))
    numbers = np.frombuffer(base64.b64decode(told["embedding"]), "<f4")
    np.testing.assert_array_equal(numbers, np.array([0.6, 0.8], np.float32))
    count = len(tools.tokenizer.encode("x = 1"))
    assert told["usage"] == {"prompt_tokens": count, "completion_tokens": 0, "cached_tokens": 2}
    assert (told["text"], told["token_ids"], told["finish_reason"]) == ("", [], "length")
    assert request_of(command(tools, embed=[5, 6])).input_token_ids == [5, 6]


class TwoWords:
    """The default model's tokenizer, with tokens for both answers."""

    def __init__(self, tools: TextTools) -> None:
        self._tokenizer = tools.tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def token_to_id(self, token: str) -> int | None:
        return {"yes": 11, "no": 12}.get(token)


@pytest.mark.parametrize("yes, no", [(2.0, -1.0), (-3.5, 1.25), (1e6, -1e6), (-1e30, 1e30)])
def test_the_score_is_the_share_of_yes(yes: float, no: float, tools: TextTools) -> None:
    two: Any = TwoWords(tools)
    long = ServingContext(EngineConfig(), ModelInfo("m", tools.tokenizer.vocab_size, 2048))
    body = json.dumps({"rank": {"query": "q", "document": "d", "task": "t"}}).encode()
    batch = Batch.read(EVERBATCH.tensors, [Tensor("request", np.array([body], dtype=object))], 64)
    (work,) = EVERBATCH.parse(batch, long, Parameters(), tools._replace(tokenizer=two))
    asked = request_of(work)
    assert asked.output_config.prompt_logits_of == (11, 12) and asked.max_tokens == 0
    assert "<Instruct>: t\n<Query>: q\n<Document>: d" in tools.tokenizer.decode(asked.input_token_ids, False)
    expected = 1 / (1 + math.exp(min(no - yes, 700)))
    assert answer(work, result(prompt_logits=rows([yes, no])))["score"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"embed": ""}, "embed is empty; give at least one character"),
        ({"embed": []}, "embed holds no token; give more text"),
        ({"embed": [-1]}, "embed has token -1, which is outside the vocabulary"),
        ({"embed": "x" * 2049}, "embed has 2049 characters, the limit is 2048"),
        ({"embed": 5}, r"request\.embed: expected"),
        ({"embed": "a", "dimensions": 0}, "dimensions is 0, allowed is 1 to 4"),
        ({"embed": "a", "max_tokens": 5}, "'max_tokens' is no known parameter"),
        ({"embed": "a", "lora_name": "x"}, "x"),
        ({"rank": {"query": "q"}}, "document"),
        (
            {"rank": {"query": "q", "document": "d"}},
            "this model cannot rank documents: its vocabulary has no tokens yes",
        ),
        ({"rank": {"query": "q", "document": "d" * 3000}}, "documents has 3000 characters, the limit is 2048"),
    ],
)
def test_commands_that_are_wrong_are_named(keys: dict[str, Any], sentence: str, tools: TextTools) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        command(tools, **keys)
