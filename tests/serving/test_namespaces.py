"""Whose request it is, and its time limit, reach the engine from each row of each wire; what runs is out of others' reach."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from backend.api import EngineConfig, Request
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.tensors import ModelTensors
from backend.serving.wires.everbatch import EVERBATCH
from backend.serving.wires.front import TextTools
from backend.serving.wires.trtllm_tensors import BLS, ENSEMBLE, ENSEMBLE_UINT32, TOKEN_MODEL
from backend.serving.wires.trtllm_text import parse_text_requests
from backend.serving.wires.trtllm_tokens import parse_token_requests
from backend.serving.work import StopSession, Work
from tests.serving.fake_triton import Tensor
from tests.serving.helpers import ints, strings, token_inputs, uint64
from tests.serving.test_embedding_model import TwoWords

MINE = Parameters(3.0, "mine")
WIRES = [TOKEN_MODEL, ENSEMBLE, BLS, ENSEMBLE_UINT32]


def works(tools: TextTools, wire: ModelTensors, **inputs: np.ndarray) -> list[Work]:
    """Two rows."""
    if wire is TOKEN_MODEL:
        given = token_inputs([[1, 2], [3]], **inputs)
    else:
        given = {"text_input": strings("a", "b"), "max_tokens": ints(4, 4), **inputs}
    types = {tensor.name: np.uint32 for tensor in wire.inputs if tensor.dtype == "UINT32"}
    tensors = [Tensor(name, array.astype(types.get(name, array.dtype))) for name, array in given.items()]
    batch = Batch.read(wire, tensors, 64)
    context = ServingContext(EngineConfig(), ModelInfo("m", tools.tokenizer.vocab_size, 2048, eos_ids=(3,)))
    if wire is TOKEN_MODEL:
        return parse_token_requests(batch, context, MINE)
    return parse_text_requests(batch, context, MINE, tools)


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.model)
def test_each_row_is_its_clients(wire: ModelTensors, tools: TextTools) -> None:
    for inputs in ({}, {"CORRID": uint64(5, 6)}):
        for each in works(tools, wire, **inputs):
            assert isinstance(each.request, Request)
            assert (each.request.cache_salt, each.request.timeout_s) == ("mine", 3.0)


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.model)
def test_a_stop_is_for_a_session_of_its_client(wire: ModelTensors, tools: TextTools) -> None:
    sessions = works(tools, wire, CORRID=uint64(5, 6), STOP=ints(1, 1), START=ints(0, 0), END=ints(0, 1))
    assert [each.request for each in sessions] == [StopSession(5, False, "mine"), StopSession(6, True, "mine")]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "max_tokens": 2},
        {"prompt_token_ids": [1], "max_tokens": 2},
        {"embed": "a"},
        {"rank": {"query": "q", "document": "d", "task": "t"}},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_json_request_is_its_clients(body: dict[str, Any], tools: TextTools) -> None:
    two: Any = TwoWords(tools)
    batch = Batch.read(EVERBATCH.tensors, [Tensor("request", strings(json.dumps(body))[0])], 64)
    info = ModelInfo("m", tools.tokenizer.vocab_size, 2048, output_widths={"hidden_states": 4})
    (work,) = EVERBATCH.parse(batch, ServingContext(EngineConfig(), info), MINE, tools._replace(tokenizer=two))
    assert isinstance(work.request, Request)
    assert (work.request.cache_salt, work.request.timeout_s) == ("mine", 3.0)
