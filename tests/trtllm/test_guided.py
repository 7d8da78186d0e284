"""Guided decoding through TensorRT-LLM's bindings: set-up, materials, and what comes out."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from compat import trtllm
from tests.e2e.wire import eventually
from tests.guided.tools import MODEL, info, tokenizer

GuideType = trtllm.GuidedDecodingParams.GuideType
BACKEND = trtllm.GuidedDecodingConfig.GuidedDecodingBackend
SCHEMA = """
{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"],
 "additionalProperties": false}
"""


TAG = json.dumps(
    {
        "type": "structural_tag",
        "triggers": ["("],
        "structures": [{"begin": "(", "schema": {"enum": ["red", 7]}, "end": ")"}],
    }
)
NOT_SET_UP = "GuidedDecoder is not setup"
OWN_PROCESS = trtllm.ParallelConfig(
    communication_mode=trtllm.CommunicationMode.ORCHESTRATOR, orchestrator_config=trtllm.OrchestratorConfig()
)


def guided_config(**materials: Any) -> trtllm.ExecutorConfig:
    return trtllm.ExecutorConfig(
        1,
        max_batch_size=4,
        kv_cache_config=trtllm.KvCacheConfig(max_tokens=1024),
        guided_decoding_config=trtllm.GuidedDecodingConfig(BACKEND.LLGUIDANCE, **materials),
    )


def started(config: trtllm.ExecutorConfig) -> trtllm.Executor:
    return trtllm.Executor(MODEL, trtllm.ModelType.DECODER_ONLY, config)


def executor(**materials: Any) -> trtllm.Executor:
    return started(guided_config(**materials))


def ask(made: trtllm.Executor, kind: Any, guide: str | None, max_tokens: int = 60, **fields: Any) -> trtllm.Response:
    """The answer to a request that was pickled on its way."""
    request = trtllm.Request(
        tokenizer().encode("Answer: "),
        max_tokens,
        end_id=tokenizer().eos_ids[0],
        output_config=trtllm.OutputConfig(exclude_input_from_output=True),
        guided_decoding_params=trtllm.GuidedDecodingParams(kind, guide),
        **fields,
    )
    copy = pickle.loads(pickle.dumps(request))
    assert copy == request and copy.guided_decoding_params.guide == guide
    (response,) = made.await_responses(made.enqueue_request(copy), timedelta(seconds=30))
    return response


def answer(made: trtllm.Executor, kind: Any, guide: str | None, max_tokens: int = 60, **fields: Any) -> str:
    response = ask(made, kind, guide, max_tokens, **fields)
    assert not response.has_error(), response.error_msg
    return tokenizer().decode(response.result.output_token_ids[0])


@pytest.mark.feature("000-42", "000-43")
@pytest.mark.parametrize("given", ["none", "vocabulary", "all"])
def test_an_executor_that_is_set_up_obeys_guides(given: str) -> None:
    """With the model's tokenizer, with a vocabulary alone, and with all materials that the bindings name."""
    alone = {"encoded_vocab": info().encoded_vocab, "stop_token_ids": info().stop_token_ids}
    materials = {"none": {}, "vocabulary": alone, "all": {**alone, "tokenizer_str": info().tokenizer_str}}[given]
    made = executor(**materials)
    try:
        assert re.fullmatch(r"\{\s*\"n\":\s*\d\s*\}", answer(made, GuideType.JSON_SCHEMA, SCHEMA))
        assert re.fullmatch("[xyz]{3}", answer(made, GuideType.REGEX, "[xyz]{3}"))
        assert answer(made, GuideType.EBNF_GRAMMAR, 'root ::= "ab" | "ba"') in ("ab", "ba")
    finally:
        made.shutdown()


def test_materials_that_do_not_fit_the_model_are_refused() -> None:
    made = executor(encoded_vocab=["a"] * 5000)
    try:
        request = trtllm.Request([1], 1, guided_decoding_params=trtllm.GuidedDecodingParams(GuideType.JSON))
        (response,) = made.await_responses(made.enqueue_request(request), timedelta(seconds=30))
        assert "GuidedDecoder is not setup: the vocabulary for guided decoding has 5000 entries" in response.error_msg
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def apart() -> Iterator[trtllm.Executor]:
    """An Executor whose engine is a process of its own, set up by a configuration that was pickled, with all materials."""
    given = guided_config(
        encoded_vocab=info().encoded_vocab, tokenizer_str=info().tokenizer_str, stop_token_ids=info().stop_token_ids
    )
    given.parallel_config = OWN_PROCESS
    config = pickle.loads(pickle.dumps(given))
    assert config == given and config.guided_decoding_config.encoded_vocab == info().encoded_vocab
    made = started(config)
    yield made
    made.shutdown()


@pytest.mark.feature("000-01", "000-42")
def test_an_engine_process_obeys_guides_as_the_engine_in_this_process_does(apart: trtllm.Executor) -> None:
    asked: list[tuple[Any, str | None]] = [
        (GuideType.JSON, None),
        (GuideType.JSON_SCHEMA, SCHEMA),
        (GuideType.REGEX, "[xyz]{3}"),
        (GuideType.EBNF_GRAMMAR, 'root ::= "ab" | "ba"'),
        (GuideType.STRUCTURAL_TAG, TAG),
    ]
    here = executor()
    try:
        expected = [answer(here, *each) for each in asked]
    finally:
        here.shutdown()
    found = [answer(apart, *each) for each in asked]
    assert found == expected
    assert found[0].startswith("{") and re.fullmatch(r"\{\s*\"n\":\s*\d\s*\}", found[1])
    assert re.fullmatch("[xyz]{3}", found[2]) and found[3] in ("ab", "ba")


def test_an_engine_process_refuses_guides_by_name_and_goes_on(apart: trtllm.Executor) -> None:
    assert "not" in ask(apart, GuideType.JSON_SCHEMA, '{"not": {}}').error_msg
    assert "cannot be compiled" in ask(apart, GuideType.REGEX, "(").error_msg
    two = trtllm.SamplingConfig(min_tokens=2)
    assert "min_tokens is 2, the limit" in ask(apart, GuideType.REGEX, "a", sampling_config=two).error_msg
    one = trtllm.SamplingConfig(min_tokens=1)
    assert answer(apart, GuideType.REGEX, "a", sampling_config=one) == "a"


def test_an_engine_process_that_was_started_again_obeys_guides(apart: trtllm.Executor) -> None:
    """Its compiled guides have died with it, and its materials are read once more."""
    process = apart._core._process
    assert process is not None
    pid = process.pid
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: process.pid not in (None, pid) and apart._core.is_ready(), 60)
    assert re.fullmatch("[xyz]{3}", answer(apart, GuideType.REGEX, "[xyz]{3}"))


@pytest.mark.feature("000-42")
@pytest.mark.parametrize("parallel", [None, OWN_PROCESS])
def test_an_executor_that_is_not_set_up_says_so(parallel: trtllm.ParallelConfig | None) -> None:
    cache = trtllm.KvCacheConfig(max_tokens=1024)
    made = started(trtllm.ExecutorConfig(1, max_batch_size=4, kv_cache_config=cache, parallel_config=parallel))
    try:
        assert NOT_SET_UP in ask(made, GuideType.REGEX, "a").error_msg
    finally:
        made.shutdown()
