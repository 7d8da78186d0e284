"""int8 checkpoints of compressed-tensors: what is read, and what is refused with which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.api import ConfigError
from backend.api.checkpoint.quantised import FORMATS
from backend.layers.linear import DenseLinear, Linear, QuantizedLinear
from backend.models.config import parse_model_config
from backend.models.decoder import Decoder
from backend.models.linears import LinearOptions
from backend.models.loader import load_directory
from benchmarks.quality.perplexity import row_logits
from kernels.common.quantize import dequantize, quantize_activations
from tests.weight_formats.checkpoints import ACTIVATIONS, ODD, WEIGHTS, quantization_config, write_config, write_pair

CHANNEL, GROUP = WEIGHTS, WEIGHTS | dict(strategy="group", group_size=32)
ROWS = torch.randint(131, (2, 33), generator=torch.Generator().manual_seed(0))
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load(directory: Path, **options: object) -> Decoder:
    return load_directory(directory, None, "float32", torch.device("cpu"), LinearOptions(**options))


class QuantizesActivations(DenseLinear):
    """A float layer behind activations that have been quantised."""

    group: int

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(dequantize(*quantize_activations(x, self.group), self.group))


@pytest.mark.parametrize("format", ["int-quantized", "pack-quantized"])
@pytest.mark.parametrize("weights", [CHANNEL, GROUP], ids=["channel", "group"])
@pytest.mark.parametrize(
    "family, overrides",
    [
        ("llama", ODD | dict(attention_bias=True, mlp_bias=True)),
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama3", {}),
        ("qwen3_moe", {}),
    ],
    ids=["odd", "qwen2", "qwen3", "tied", "experts"],
)
def test_a_weight_only_checkpoint_has_the_logits_of_its_dequantised_weights(
    tmp_path: Path, family: str, overrides: dict[str, bool | int], weights: dict[str, Any], format: str
) -> None:
    int8, floats = write_pair(tmp_path, family, quantization_config(format, weights=weights), **overrides)
    model = load(int8)
    assert {type(layer.attention.qkv) for layer in model.layers} == {QuantizedLinear}
    assert type(model.lm_head) is DenseLinear, "lm_head is on the ignore list"
    torch.testing.assert_close(row_logits(model, ROWS), row_logits(load(floats), ROWS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", [CHANNEL, GROUP], ids=["channel", "group"])
def test_dynamic_int8_activations_are_quantised_per_token_and_group(tmp_path: Path, weights: dict[str, Any]) -> None:
    section = quantization_config(weights=weights, input_activations=ACTIVATIONS)
    int8, floats = write_pair(tmp_path, "llama", section)
    sizes = {48: weights["group_size"] or 48, 80: weights["group_size"] or 80}  # hidden and intermediate columns

    def make(weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.shape[0] == 131:
            return DenseLinear(weight, bias)
        layer = QuantizesActivations(weight, bias)
        layer.group = sizes[weight.shape[1]]
        return layer

    measured, expected = row_logits(load(int8), ROWS), row_logits(load(floats, make=make), ROWS)
    assert (measured - row_logits(load(floats), ROWS)).abs().max() > 1e-2, "activations were not quantised"
    # A value half-way between two steps may round either way after a different order of addition.
    assert (measured - expected).norm() < 0.01 * expected.norm()


def test_layers_that_are_quantised_only_in_part_are_refused(tmp_path: Path) -> None:
    int8, floats = write_pair(tmp_path, "llama", quantization_config())
    weights = load_file(int8 / "model.safetensors")
    weights[Q_PROJ] = load_file(floats / "model.safetensors")[Q_PROJ]
    del weights[Q_PROJ + "_scale"]
    save_file(weights, int8 / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="has model.layers.1.self_attn.k_proj, .* quantised and others .* not"):
        load(int8)


@pytest.mark.parametrize(
    "format, change, message",
    [
        ("int-quantized", lambda w: w.update({Q_PROJ: w[Q_PROJ].float()}), "is torch.float32, torch.int8 is expected"),
        ("int-quantized", lambda w: w.update({Q_PROJ: w[Q_PROJ][:, :8]}), r"has shape \[48, 8\]"),
        ("int-quantized", lambda w: w.update({Q_PROJ + "_scale": torch.ones(48, 2)}), r"scale has shape \[48, 2\]"),
        ("int-quantized", lambda w: w.update({Q_PROJ + "_zero_point": torch.ones(48, 1)}), "1 tensors .* not used"),
        ("pack-quantized", lambda w: w.update({Q_PROJ + "_shape": torch.tensor([48, 47])}), r"says \[48, 47\]"),
        ("pack-quantized", lambda w: w.pop(Q_PROJ + "_packed"), "lacks the tensor .*q_proj.weight_packed"),
    ],
)
def test_tensors_that_do_not_fit_the_format_are_refused(
    tmp_path: Path, format: str, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    int8, _ = write_pair(tmp_path, "llama", quantization_config(format))
    weights = load_file(int8 / "model.safetensors")
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, int8 / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(int8)


def test_int8_weights_without_a_scale_are_refused(tmp_path: Path) -> None:
    int8, _ = write_pair(tmp_path, "llama", quantization_config())
    weights = load_file(int8 / "model.safetensors")
    del weights["model.layers.2.self_attn.o_proj.weight_scale"]
    save_file(weights, int8 / "model.safetensors")
    with pytest.raises(ConfigError, match="2.self_attn.o_proj.weight is torch.int8, torch.float32 or"):
        load(int8)


@pytest.mark.parametrize("activations, own, other", [(None, "int8", "w8a8"), (ACTIVATIONS, "w8a8", "int8")])
def test_a_setting_may_repeat_the_checkpoint_s_format_but_not_contradict_it(
    tmp_path: Path, activations: dict[str, Any] | None, own: str, other: str
) -> None:
    int8, _ = write_pair(tmp_path, "llama", quantization_config(input_activations=activations))
    assert type(load(int8, quantization=own).lm_head) is DenseLinear
    with pytest.raises(ConfigError, match=f"model.quantization is {other}, but the checkpoint is quantised as {own}"):
        load(int8, quantization=other)


def test_what_is_in_eight_bits_is_not_rounded_to_four(tmp_path: Path) -> None:
    int8, _ = write_pair(tmp_path, "llama", quantization_config())
    with pytest.raises(ConfigError, match="model.quantization is w4a8, but the checkpoint is quantised as int8; use"):
        load(int8, quantization="w4a8")


def refusal(section: object) -> str:
    raw = dict(architectures=["LlamaForCausalLM"], vocab_size=9, hidden_size=8, intermediate_size=8)
    raw |= dict(num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64, quantization_config=section)
    with pytest.raises(ConfigError) as error:
        parse_model_config(json.dumps(raw))
    return str(error.value)


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(weights=WEIGHTS | dict(num_bits=2)), "weights of 2 bits"),
        (dict(weights=WEIGHTS | dict(num_bits=4)), "weights of 4 bits in format int-quantized"),
        (dict(weights=WEIGHTS | dict(type="float")), "weights of type float"),
        (dict(weights=WEIGHTS | dict(symmetric=False)), "asymmetric weights of 8 bits"),
        (dict(weights=WEIGHTS | dict(strategy="tensor")), "weight strategy tensor"),
        (dict(weights=WEIGHTS | dict(strategy="group", group_size=0)), "weight group_size 0"),
        (dict(weights=WEIGHTS | dict(actorder="group")), "weight actorder group"),
        (dict(weights=None), "no weights"),
        (dict(input_activations=ACTIVATIONS | dict(dynamic=False)), "static activations"),
        (dict(input_activations=ACTIVATIONS | dict(dynamic="local")), "static activations"),
        (dict(input_activations=ACTIVATIONS | dict(symmetric=False)), "asymmetric activations"),
        (dict(input_activations=ACTIVATIONS | dict(strategy="tensor")), "activation strategy tensor"),
        (dict(input_activations=ACTIVATIONS | dict(num_bits=4)), "activations of 4 bits"),
        (dict(input_activations=ACTIVATIONS | dict(type="float")), "activations of type float"),
        (dict(output_activations=ACTIVATIONS), "output_activations"),
        (dict(targets=["re:.*down_proj"]), "targets ['re:.*down_proj']"),
        (dict(format="float-quantized"), "weights of type int"),
        (dict(format="marlin-24"), "format marlin-24"),
        (dict(config_groups={}), "0 config_groups"),
        (dict(kv_cache_scheme=WEIGHTS), "kv_cache_scheme"),
        (dict(sparsity_config=dict(format="sparse-24-bitmask")), "sparsity_config"),
        (dict(transform_config=dict(config_groups={"R1": {}})), "transform_config"),
    ],
)
def test_other_formats_of_compressed_tensors_are_refused_by_name(changes: dict[str, object], reason: str) -> None:
    message = refusal(quantization_config(**changes))
    assert f"(compressed-tensors: {reason}), which is not supported" in message
    assert message.endswith("use a float checkpoint, or " + FORMATS)


@pytest.mark.parametrize("method", ["bitsandbytes", "fbgemm_fp8", "quark", "torchao"])
def test_other_methods_are_refused_by_name(method: str) -> None:
    assert f"quantised ({method}), which is not supported; use a float checkpoint, or" in refusal(
        dict(quant_method=method, bits=8)
    )


@pytest.mark.parametrize(
    "section, message",
    [
        ([1], "quantization_config is [1], an object is needed"),
        (dict(quant_method="compressed-tensors"), "lacks the key quantization_config.config_groups"),
        (
            quantization_config(config_groups={"group_0": dict(targets="Linear")}),
            "config_groups.group_0.targets is 'Linear'",
        ),
        (quantization_config(weights=WEIGHTS | dict(num_bits="eight")), "weights.num_bits is 'eight', int is needed"),
    ],
)
def test_a_section_that_is_not_what_it_should_be_is_refused(
    section: dict[str, object] | list[int], message: str
) -> None:
    assert message in refusal(section)


def test_the_older_name_of_the_section_is_read(tmp_path: Path) -> None:
    int8, _ = write_pair(tmp_path, "llama", quantization_config())
    raw = json.loads((int8 / "config.json").read_text())
    raw["compression_config"] = raw.pop("quantization_config")
    write_config(int8, raw)
    assert type(load(int8).layers[0].mlp.down) is QuantizedLinear
