"""Guided decoding through TensorRT-LLM's bindings: set-up, materials, and what comes out."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from backend import trtllm
from tests.guided.tools import MODEL, info, tokenizer

GuideType = trtllm.GuidedDecodingParams.GuideType
BACKEND = trtllm.GuidedDecodingConfig.GuidedDecodingBackend
SCHEMA = """
{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"],
 "additionalProperties": false}
"""


def executor(**materials: Any) -> trtllm.Executor:
    config = trtllm.ExecutorConfig(
        1,
        max_batch_size=4,
        kv_cache_config=trtllm.KvCacheConfig(max_tokens=1024),
        guided_decoding_config=trtllm.GuidedDecodingConfig(BACKEND.LLGUIDANCE, **materials),
    )
    return trtllm.Executor(MODEL, trtllm.ModelType.DECODER_ONLY, config)


def answer(made: trtllm.Executor, kind: Any, guide: str | None, max_tokens: int = 60) -> str:
    request = trtllm.Request(
        tokenizer().encode("Answer: "),
        max_tokens,
        end_id=tokenizer().eos_ids[0],
        output_config=trtllm.OutputConfig(exclude_input_from_output=True),
        guided_decoding_params=trtllm.GuidedDecodingParams(kind, guide),
    )
    (response,) = made.await_responses(made.enqueue_request(request), timedelta(seconds=30))
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
