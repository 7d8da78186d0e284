"""The LoRA adapters that requests of model `vllm` may name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backend.api import ConfigError, EngineConfig, ErrorCode, Unsupported
from backend.api.config.schema import LoraSection
from backend.api.lora import LoraConfig
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.front import TextTools
from backend.serving.wires.named_adapters import check_adapters, named_adapter, read_adapters
from backend.serving.wires.vllm import VLLM, error_text
from tests.fakes.adapter_files import write_adapter
from tests.serving.fake_triton import Tensor
from tests.serving.test_vllm_front import MAX_SEQ_LEN, tensors

pytestmark = pytest.mark.feature("W-07")


@pytest.mark.parametrize("is_enabled", [True, False])
def test_an_adapter_is_named_by_the_models_own_list(
    tools: TextTools,
    is_enabled: bool,
) -> None:
    """The texts are those of Triton's vLLM backend."""
    config = EngineConfig(lora=LoraSection(enabled=is_enabled))
    info = ModelInfo("m", tools.tokenizer.vocab_size, MAX_SEQ_LEN, eos_ids=(3,))
    context = ServingContext(config, info, adapters={"doll": "/loras/doll", "sheep": "/loras/sheep"})

    def lora_of(name: str) -> LoraConfig | None:
        given = tensors(sampling={"lora_name": name})
        batch = Batch.read(VLLM.tensors, [Tensor(*item) for item in given.items()], 64)
        return VLLM.parse(batch, context, Parameters(), tools)[0].request.lora

    if not is_enabled:
        with pytest.raises(Unsupported, match=r"^LoRA feature is not enabled\.$"):
            lora_of("doll")
        return
    assert (lora_of("doll").path, lora_of("sheep").path) == ("/loras/doll", "/loras/sheep")
    assert lora_of("doll").task_id == lora_of("doll").task_id != lora_of("sheep").task_id
    message = "LoRA cow is not supported, we currently support ['doll', 'sheep']"
    with pytest.raises(Unsupported, match=re.escape(message)):
        lora_of("cow")
    assert error_text(ErrorCode.UNSUPPORTED, message) == message


def test_the_list_of_adapters_is_a_file_beside_the_model(tmp_path: Path) -> None:
    assert read_adapters(tmp_path) == {}
    (tmp_path / "multi_lora.json").write_text('{"doll": "/loras/doll", "sheep": "sheep"}')
    assert read_adapters(tmp_path) == {"doll": "/loras/doll", "sheep": str(tmp_path / "sheep")}
    for wrong in ("[]", '{"doll": 1}', "{", '{"doll": ""}'):
        (tmp_path / "multi_lora.json").write_text(wrong)
        with pytest.raises(ConfigError, match="multi_lora.json is no JSON object of adapters' names"):
            read_adapters(tmp_path)


def test_an_adapter_of_the_list_that_cannot_be_served_ends_the_start(tmp_path: Path) -> None:
    write_adapter(tmp_path / "fine", rank=8)
    write_adapter(tmp_path / "high", rank=9)
    write_adapter(tmp_path / "head", rank=8, module="lm_head")
    lora = LoraSection(enabled=True, max_rank=8)
    named = {name: str(tmp_path / name) for name in ("fine", "high", "head", "none")}
    check_adapters({"fine": named["fine"]}, lora)
    for name, sentence in {
        "high": "adapter high: it has rank 9 in layer 0, q_proj, the limit is 8 (lora.max_rank)",
        "head": "adapter head: adapter_model.safetensors: tensor base_model.model.lm_head.lora_A.weight is no LoRA of a decoder",
        "none": "adapter none: none: adapter_config.json: File does not exist",
    }.items():
        with pytest.raises(ConfigError, match=f"multi_lora.json: {re.escape(sentence)}"):
            check_adapters({name: named[name]}, lora)
    check_adapters(named, LoraSection())  # without LoRA nobody can name any


def test_ten_of_the_names_are_told_and_how_many_more_there_are() -> None:
    names = {f"a{i}": f"/loras/{i}" for i in range(12)}
    told = "there are a0, a1, a2, a3, a4, a5, a6, a7, a8, a9 and 2 more; name one of them"
    with pytest.raises(Unsupported, match=told):
        named_adapter("cow", names, is_enabled=True)
    names.popitem()
    names.popitem()
    with pytest.raises(Unsupported, match="a8, a9; name"):
        named_adapter("cow", names, is_enabled=True)
