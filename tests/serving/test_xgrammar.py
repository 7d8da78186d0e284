"""The library xgrammar behind an Executor, a stub over that Executor, and an LLM: its own processes compile, no double does."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import numpy as np
import pytest

from backend.api import EngineConfig, OutputConfig, Request
from backend.api.config.schema import GuidedConfig, KvCacheConfig, SchedulerConfig
from backend.api.guide import Guide, GuideType
from backend.executor import Executor
from backend.serving.served_model import ServedModel
from backend.serving.server import ModelServer
from backend.serving.wires.trtllm_tensors import TOKEN_MODEL
from backend.serving.wires.trtllm_tokens import parse_token_requests
from compat.llm import LLM, GuidedDecodingParams, SamplingParams
from tests.guided.tools import MODEL, tokenizer
from tests.serving.fake_triton import InferenceRequest
from tests.serving.helpers import bools, ints, strings, token_inputs

pytestmark = [
    pytest.mark.feature("000-42"),
    pytest.mark.skipif(
        importlib.util.find_spec("xgrammar") is None, reason="xgrammar (requirements/xgrammar.txt) is not installed"
    ),
]
PROMPT = "Answer: "
PATIENCE_S = 60.0
CONFIG = EngineConfig(
    kv_cache=KvCacheConfig(max_tokens=1024),
    scheduler=SchedulerConfig(max_batch_size=4),
    guided=GuidedConfig(backend="xgrammar", compile_timeout_s=PATIENCE_S, compile_processes=1),
)
Ask = Callable[[str, str], str]  # (type of a guide, its text) -> the answer, or the error
SCHEMA = '{"type": "object", "properties": {"n": {"enum": [3, 7]}}, "required": ["n"], "additionalProperties": false}'
# A form that llguidance takes and xgrammar does not, so that the refusal tells which of them has compiled.
ALONE = json.dumps(
    {"type": "structural_tag", "free_text": False, "structures": [{"begin": "(", "schema": {"enum": [7]}, "end": ")"}]}
)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor.from_directory(MODEL, CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def by_executor(executor: Executor) -> Ask:
    def ask(kind: str, text: str) -> str:
        output, prompt = OutputConfig(exclude_input_from_output=True), tokenizer().encode(PROMPT)
        guide = Guide(GuideType(kind), text)
        request = Request(prompt, 40, end_ids=tuple(tokenizer().eos_ids), output_config=output, guide=guide)
        (response,) = executor.await_responses(executor.enqueue_request(request), timedelta(seconds=PATIENCE_S))
        return response.error_msg if response.has_error() else tokenizer().decode(response.result.output_token_ids[0])

    return ask


@pytest.fixture(scope="module")
def by_server(executor: Executor) -> Ask:
    server = ModelServer(ServedModel(TOKEN_MODEL, parse_token_requests), executor, CONFIG)

    def ask(kind: str, text: str) -> str:
        guide = {"guided_decoding_guide_type": strings(kind), "guided_decoding_guide": strings(text)}
        extra = {"end_id": ints(tokenizer().eos_ids[0]), "exclude_input_in_output": bools(True)}
        request = InferenceRequest(token_inputs([tokenizer().encode(PROMPT)], 40, **guide, **extra))
        server.execute([request])
        (response,) = request.sender.wait()
        if response.has_error():
            return response.error().message()
        return tokenizer().decode(np.ravel(response.outputs()["output_ids"]).tolist())

    return ask


@pytest.fixture(scope="module")
def by_llm() -> Iterator[Ask]:
    fields = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar", "structural_tag": "structural_tag"}

    def ask(llm: LLM, kind: str, text: str) -> str:
        guide = GuidedDecodingParams(**{fields[kind]: text})
        try:
            return (
                llm.generate(PROMPT, SamplingParams(max_tokens=40, guided_decoding=guide), use_tqdm=False)
                .outputs[0]
                .text
            )
        except Exception as error:  # the LLM API raises what the others answer
            return str(error)

    with LLM(MODEL, guided_decoding_backend="xgrammar", engine_config=CONFIG) as made:
        yield partial(ask, made)


@pytest.mark.parametrize("way", ["by_executor", "by_server", "by_llm"])
def test_xgrammar_itself_holds_the_answers_to_their_forms(way: str, request: pytest.FixtureRequest) -> None:
    ask: Ask = request.getfixturevalue(way)
    assert json.loads(ask("json_schema", SCHEMA))["n"] in (3, 7)
    assert re.fullmatch("[xyz]{3}-[0-9]", ask("regex", "[xyz]{3}-[0-9]"))
    assert ask("ebnf_grammar", 'root ::= "ab" | "ba"') in ("ab", "ba")
    assert "cannot be compiled" in ask("regex", "(")
    refused = ask("structural_tag", ALONE)
    assert "xgrammar takes no structural tag with free_text; use guided.backend=llguidance" in refused
