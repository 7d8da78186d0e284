"""What transformers runs beyond the plain checkpoints of test_families.py, and what is refused."""

from __future__ import annotations

import json
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.api.errors import ConfigError
from backend.architectures.hosted import HOSTED, REFUSED, implementation_of
from backend.hosted.checkpoint import HostedCheckpoint
from tests.hosted.harness import hosted_driver
from tests.hosted.tiny import content, save, tiny_config, tiny_model
from tests.model.driver import Driver
from tests.native.harness import Format, prompt

TOKENS = [3 + token for token in prompt(40, 157)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP MX, E2M1


def assert_agrees(driver: Driver, model: transformers.PreTrainedModel) -> None:
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    driver.begin(0, TOKENS)
    measured = driver.run(0, [11, 29])
    assert (measured.log_softmax(-1) - expected.log_softmax(-1)).abs().max() <= 1e-4


def change(directory: Path, **settings: Any) -> None:
    (directory / "config.json").write_text(json.dumps({**content(directory), **settings}))


def change_tensors(directory: Path, **tensors: Tensor | None) -> None:
    (file,) = directory.glob("*.safetensors")
    held = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, file, metadata={"format": "pt"})


def test_mxfp4_experts_are_read(tmp_path: Path, kernels: CDLL) -> None:
    model = tiny_model("gpt_oss", intermediate_size=64)
    rng = torch.Generator().manual_seed(3)
    packed: dict[str, Tensor | None] = {}
    for name, weight in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = weight.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=rng, dtype=torch.uint8)
            scales = torch.randint(121, 125, (experts, rows, columns // 32), generator=rng, dtype=torch.uint8)
            values = torch.stack((FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]), -1).flatten(-2)
            weight.data = (
                (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2).contiguous()
            )
            packed |= {name: None, name + "_blocks": blocks, name + "_scales": scales}
    change_tensors(save(model, tmp_path), **packed)
    change(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert_agrees(hosted_driver(tmp_path, kernels, Format()), model)


def test_the_text_model_of_several_models_is_served(tmp_path: Path, kernels: CDLL) -> None:
    model = tiny_model("gemma4_text")
    save(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()}
    save_file({**named, "model.vision_tower.x": torch.ones(3)}, file, metadata={"format": "pt"})
    whole = transformers.Gemma4Config(text_config=content(tmp_path)).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**whole, "architectures": ["Gemma4ForConditionalGeneration"]}))
    assert_agrees(hosted_driver(tmp_path, kernels, Format()), model)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("qwen3_moe"), tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, allowed is 0 to 4096"),
        ({"num_experts": -1}, "num_experts is -1"),
        ({"text_config": {"num_hidden_layers": 10**400}}, "num_hidden_layers is .*allowed is 0 to 4096"),
        ({"n_shared_experts": 10**9}, "n_shared_experts is 1000000000"),
        (
            {"vocab_size": 3_000_000},
            r"a model of 384\d{6} elements, .* of the shape \[3000000, 64\].* 13\d{7} are allowed; correct the sizes",
        ),
        ({"num_hidden_layers": 3}, "lacks the tensor"),
        ({"num_hidden_layers": 1}, "is not used"),
        ({"hidden_size": 96}, "Qwen3MoeForCausalLM cannot be loaded|another shape"),
        ({"hidden_size": "many"}, "transformers does not accept it"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral|rope"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method hqq is not supported"),
        ({"quantization_config": 7}, "quant_method 7 is not supported"),
        ({"model_type": "nonesuch"}, "model_type nonesuch is not known"),
        ({"model_type": ["qwen3_moe"]}, "is not known"),
        ({"hidden_act": "nonesuch"}, "nonesuch"),
        ({"rope_parameters": LONGROPE}, "use --set model.max_seq_len=64"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_a_wrong_setting_is_one_sentence(
    checkpoint: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path, **settings)
    with pytest.raises(ConfigError, match=message) as error:
        hosted_driver(tmp_path, None, Format())
    assert "\n" not in str(error.value)


def test_a_mask_of_all_positions_is_not_made_where_it_is_larger_than_the_model(tmp_path: Path) -> None:
    """GPTBigCode has an attention mask of [positions, positions]: with 16,000 positions 256 million elements."""
    save(tiny_model("gpt_bigcode"), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    name = next(name for name in load_file(file) if name.endswith("wpe.weight"))
    change_tensors(tmp_path, **{name: torch.zeros(16_000, 64)})
    change(tmp_path, n_positions=16_000)
    with pytest.raises(ConfigError, match=r"bias of the shape \[16000, 16000\] is the largest"):
        hosted_driver(tmp_path, None, Format())


def test_families_that_are_refused_say_why() -> None:
    for name, reason in REFUSED.items():
        assert name not in HOSTED
        with pytest.raises(ConfigError, match=reason.replace("(", r"\(")):
            implementation_of({"architectures": [name]}, "auto")


def test_native_families_may_be_run_by_transformers() -> None:
    llama = {"architectures": ["LlamaForCausalLM"]}
    assert implementation_of(llama, "auto") == "native" and implementation_of(llama, "transformers") == "transformers"
    hosted = {"architectures": ["MiniCPM3ForCausalLM"]}
    assert implementation_of(hosted, "auto") == "transformers"
    with pytest.raises(ConfigError, match="model.implementation is native"):
        implementation_of(hosted, "native")
    with pytest.raises(ConfigError, match="near it are Qwen3MoeForCausalLM"):
        implementation_of({"architectures": ["Qwen3MoEForCausalLM"]}, "auto")


@pytest.mark.parametrize("wanted", ["auto", "transformers"])
def test_names_that_are_near_are_proposed_once_each_and_others_are_not(wanted: Any) -> None:
    with pytest.raises(ConfigError) as told:
        implementation_of({"architectures": ["LamaForCausalLM"]}, wanted)
    assert str(told.value).count("LlamaForCausalLM") == 1
    with pytest.raises(ConfigError) as told:
        implementation_of({"architectures": ["WonderForCausalLM"]}, wanted)
    assert "near it" not in str(told.value)


def test_keys_that_transformers_does_not_know_are_told(checkpoint: Path) -> None:
    given = json.loads((checkpoint / "config.json").read_text())
    remarks = HostedCheckpoint(given, {}).remarks
    assert len(remarks) == 1 and "is run by the transformers library" in remarks[0]
    given |= {"flux_capacitor": 88, "use_cache": False, "attention_dropout": 0.5, "off": None}
    told = HostedCheckpoint(given, {}).remarks[1]
    assert "flux_capacitor" in told and "attention_dropout" not in told and "off" not in told.split("effect:")[1]


def test_every_causal_family_of_transformers_is_served_or_refused() -> None:
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    left = {name for name in known.values() if name.endswith(("ForCausalLM", "LMHeadModel"))} - {*HOSTED, *REFUSED}
    assert left == ELSEWHERE, "decide these by tests/hosted/tiny.py"


# Architectures that are native only, or that make no sense alone.
ELSEWHERE = {
    "BambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
}


@pytest.mark.parametrize("kind", ["mamba", "llama4_text", "diffllama", "deepseek_v4"])
def test_what_is_refused_could_not_be_run(tmp_path: Path, kind: str) -> None:
    """So that an entry of REFUSED goes when a release of transformers makes the family fit."""
    config = tiny_config(kind)
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with pytest.raises(ConfigError):
        hosted_driver(save(model, tmp_path), None, Format())
