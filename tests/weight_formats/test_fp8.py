"""FP8 checkpoints, as DeepSeek, Qwen, llm-compressor and ModelOpt publish them: their numbers, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.api import ConfigError
from backend.api.checkpoint.quantised import Fp8Format
from backend.api.config.schema import KvCacheConfig, ModelConfigSection
from backend.models.config import parse_model_config
from backend.models.fp8 import Fp8Tensors
from backend.models.loader import load_directory, open_directory
from backend.worker.loaded_model import LoadedModel
from benchmarks.quality.perplexity import row_logits
from tests.families.tiny import make
from tests.model.tiers import native_kernels  # noqa: F401 (a fixture)

ROWS = torch.randint(131, (2, 33), generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")
BLOCK = [32, 16]  # rows and columns; neither divides all weights of the tiny models
FLOAT8 = dict(num_bits=8, type="float", symmetric=True, dynamic=False)


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = dict(targets=["Linear"], weights=FLOAT8 | dict(strategy=strategy) | weights)
    group["input_activations"] = FLOAT8 | dict(strategy="token", dynamic=True)
    return dict(quant_method="compressed-tensors", format="float-quantized", config_groups=dict(group_0=group))


class Form(NamedTuple):
    config: dict[str, Any]
    scale: str  # the end of the tensors' names
    shape: str


FORMS = {
    "deepseek": Form(
        dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=BLOCK),
        "weight_scale_inv",
        "block",
    ),
    "fp8 of tensors": Form(dict(quant_method="fp8", activation_scheme="static"), "weight_scale", "tensor"),
    "rows": Form(compressed("channel"), "weight_scale", "row"),
    "tensors": Form(compressed("tensor"), "weight_scale", "tensor"),
    "blocks": Form(compressed("block", block_structure=BLOCK), "weight_scale", "block"),
    "modelopt": Form(
        dict(quant_method="modelopt", quant_algo="FP8", kv_cache_scheme=dict(num_bits=8, type="float", dynamic=False)),
        "weight_scale",
        "scalar",
    ),
}


def in_fp8(weight: Tensor, shape: str) -> tuple[Tensor, Tensor, Tensor]:
    """The weight, its scales, and the numbers that they stand for."""
    n, k = weight.shape
    if shape == "block":
        rows, columns = -(-n // BLOCK[0]), -(-k // BLOCK[1])
        padded = torch.zeros(rows * BLOCK[0], columns * BLOCK[1])
        padded[:n, :k] = weight
        scale = padded.view(rows, BLOCK[0], columns, BLOCK[1]).abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(BLOCK[0], 0)[:n].repeat_interleave(BLOCK[1], 1)[:, :k]
    else:
        scale = weight.abs().amax(1, keepdim=True) / 448 if shape == "row" else weight.abs().max() / 448
        scale = scale.view(1) if shape == "tensor" else scale
        spread = scale
    q = (weight / spread).to(torch.float8_e4m3fn)
    return q, scale, q.float() * spread


def write_pair(into: Path, family: str, form: Form) -> tuple[Path, Path]:
    """A checkpoint in FP8, and one of the same numbers in floats."""
    floats, packed = make(into / "floats", family), into / "fp8"
    packed.mkdir()
    tensors, plain = {}, load_file(floats / "model.safetensors")
    for name, weight in list(plain.items()):
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            tensors[name], scale, plain[name] = in_fp8(weight, form.shape)
            tensors[name.removesuffix("weight") + form.scale] = scale
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(())
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    config = json.loads((floats / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | dict(quantization_config=form.config)))
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, floats / "model.safetensors", metadata={"format": "pt"})
    return packed, floats


def logits(directory: Path) -> Tensor:
    return row_logits(load_directory(directory, None, "float32", CPU), ROWS)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_checkpoint_has_the_logits_of_its_numbers(tmp_path: Path, form: Form) -> None:
    packed, floats = write_pair(tmp_path, "qwen3", form)
    assert torch.equal(logits(packed), logits(floats))


@pytest.mark.parametrize("family", ["qwen3 moe", "deepseek v3"])
def test_experts_and_latents_are_read_from_fp8(tmp_path: Path, family: str) -> None:
    packed, floats = write_pair(tmp_path, family, FORMS["deepseek"])
    assert torch.equal(logits(packed), logits(floats))


@pytest.mark.usefixtures("native_kernels")
def test_a_cpu_holds_it_in_eight_bits_unless_other_bits_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, floats = write_pair(tmp_path, "qwen3", FORMS["deepseek"])

    def size(directory: Path, quantization: str) -> int:
        section = ModelConfigSection(path=str(directory), dtype="bfloat16", quantization=quantization, device="cpu")
        return LoadedModel(open_directory(directory), section, KvCacheConfig(), CPU).decoder.num_linear_bytes

    caplog.set_level(logging.INFO)
    eight = size(packed, "none")
    assert "FP8 weights are held as int8" in caplog.text
    assert eight == size(floats, "int8") < size(floats, "none") and size(packed, "w4a8") == size(floats, "w4a8") < eight


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (dict(quant_method="fp8", fmt="e5m2"), "fp8: fmt e5m2"),
        (dict(quant_method="fp8", weight_block_size=[128, 0]), r"weight_block_size \[128, 0\]"),
        (dict(quant_method="fp8", weight_block_size=[128]), r"weight_block_size \[128\]"),
        (dict(quant_method="modelopt", quant_algo="NVFP4"), "modelopt: NVFP4"),
        (compressed("group", group_size=32), "weight strategy group"),
        (compressed("channel", num_bits=4), "weights of 4 bits"),
        (compressed("block", block_structure=[-1, 2]), "weight block_structure"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, section: dict[str, Any], sentence: str) -> None:
    directory = make(tmp_path, "qwen3")
    content = json.loads((directory / "config.json").read_text()) | dict(quantization_config=section)
    with pytest.raises(ConfigError, match=sentence):
        parse_model_config(json.dumps(content))


def test_a_block_that_is_larger_than_the_weight_takes_no_memory() -> None:
    weight = torch.ones(3, 5).to(torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.weight_scale_inv": torch.full((1, 1), 2.0)}
    assert torch.equal(Fp8Tensors(tensors, Fp8Format((65536, 65536)))["x.weight"], torch.full((3, 5), 2.0))
    tensors["x.weight_scale_inv"] = torch.tensor([[2.0], [3.0]])
    tall = Fp8Tensors(tensors, Fp8Format((2, 65536)))["x.weight"]
    assert torch.equal(tall, torch.tensor([[2.0], [2.0], [3.0]]).expand(3, 5))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda scale: scale[:1], "which does not fit a weight of"),
        (lambda scale: scale * float("nan"), "holds a number that is not finite"),
        (lambda scale: None, "has no scale of e4m3 beside it"),
    ],
)
def test_scales_that_are_damaged_are_told(tmp_path: Path, change: Any, sentence: str) -> None:
    packed, _ = write_pair(tmp_path, "qwen3", FORMS["deepseek"])
    file, name = packed / "model.safetensors", "model.layers.1.self_attn.q_proj.weight_scale_inv"
    tensors = load_file(file)
    scale = change(tensors.pop(name))
    save_file(tensors if scale is None else tensors | {name: scale}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=sentence):
        logits(packed)
