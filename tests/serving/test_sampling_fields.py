"""The typed structs and the tensors of every wire agree with the table of sampling fields."""

from __future__ import annotations

from dataclasses import fields as fields_of
from pathlib import Path
from typing import get_type_hints

import pytest

from backend.api import SamplingConfig
from backend.api.sampling import SAMPLING_FIELDS, WIRES, Wire, on_wire
from backend.serving.tensors import ModelTensors
from backend.serving.wires import llmapi, lmdeploy, trtllm_tensors, turbomind
from backend.serving.wires.everbatch import Generate
from backend.serving.wires.vllm_sampling import VllmSampling
from client.messages import INPUTS, GenerateRequest
from compat.llm.sampling_params import SamplingParams
from compat.trtllm import request_configs
from gateway.messages import ChatRequest, CompletionRequest
from tools import write_sampling_table

ROOT = Path(__file__).resolve().parents[2]
TENSORS: dict[Wire, list[ModelTensors]] = {
    "tensorrt_llm": [trtllm_tensors.TOKEN_MODEL],
    "ensemble": [trtllm_tensors.ENSEMBLE, trtllm_tensors.BLS],
    "llmapi": [llmapi.TENSORS],
    "turbomind": [turbomind.TENSORS],
    "lmdeploy": [lmdeploy.TENSORS],
}
STRUCTS: dict[Wire, list[set[str]]] = {
    "json": [set(Generate.__struct_fields__), set(VllmSampling.__struct_fields__)],
    "openai": [set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)],
    "client": [{field.name for field in fields_of(GenerateRequest)}],
    "bindings": [set(get_type_hints(request_configs.SamplingConfig))],
    "llm": [{field.name for field in fields_of(SamplingParams)}],
}
NAMES = {name for wire in WIRES for _, name in on_wire(wire)} | {field.name for field in SAMPLING_FIELDS}


def test_the_table_has_the_fields_of_the_engine_s_configuration() -> None:
    assert {field.name for field in SAMPLING_FIELDS} == set(SamplingConfig.__struct_fields__)


def test_types_are_those_of_the_engine_s_configuration() -> None:
    hints = get_type_hints(SamplingConfig)
    for field in SAMPLING_FIELDS:
        kinds = set(getattr(hints[field.name], "__args__", (hints[field.name],)))
        assert (float in kinds) == (field.dtype == "FP32"), field.name
        assert (int in kinds) == (field.dtype in ("INT32", "UINT64", "BOOL")), field.name


def test_every_wire_is_compared() -> None:
    assert {*TENSORS, *STRUCTS} == set(WIRES)


@pytest.mark.parametrize("wire", TENSORS)
def test_tensors_are_those_of_the_table(wire: Wire) -> None:
    prefix = llmapi.PREFIX if wire == "llmapi" else ""
    expected = {prefix + name for _, name in on_wire(wire)}
    for tensors in TENSORS[wire]:
        read = {spec.name for spec in tensors.inputs if spec.target.startswith("sampling.")}
        others = {spec.name for spec in tensors.inputs if spec.target == "request"}
        assert read <= expected <= read | others, tensors.model
        assert not {name for name in others if name.removeprefix(prefix) in NAMES - expected}, tensors.model


@pytest.mark.parametrize("wire", STRUCTS)
def test_structs_have_the_fields_of_the_table(wire: Wire) -> None:
    for names in STRUCTS[wire]:
        assert names & NAMES == {name for _, name in on_wire(wire)}


def test_the_client_sends_the_tensors_of_its_fields() -> None:
    """It speaks the text models' wire."""
    theirs = {name: field.name for field, name in on_wire("ensemble")}
    own = {name: field.name for field, name in on_wire("client")}
    sent = {attribute: theirs[tensor] for tensor, (_, attribute) in INPUTS.items() if tensor in theirs}
    assert sent == own


def test_limits_and_neutral_values_fit_each_other() -> None:
    for field in SAMPLING_FIELDS:
        if field.least is not None and field.greatest is not None:
            assert field.least < field.greatest, field.name
            assert all(field.least <= value <= field.greatest for value in field.with_beams or ()), field.name


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/sampling.md").read_text()
    fresh = write_sampling_table.PART.replaced(page, write_sampling_table.table())
    assert fresh == page, "run python -m tools.write_sampling_table"
