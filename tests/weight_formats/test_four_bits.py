"""Checkpoints of 4-bit weights: what is read, exactly, and what is refused with which words."""

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
from backend.architectures.description import ModelConfig
from backend.layers.linear import DenseLinear, Linear, QuantizedLinear, Weight, make_torch_linear
from backend.models.config import parse_model_config
from backend.models.decoder import Decoder
from backend.models.linears import LinearOptions
from backend.models.loader import load_directory
from backend.models.tensors import TensorSource
from kernels import w4a8, w4a16
from tests.weight_formats.checkpoints import ACTIVATIONS, WEIGHTS, quantization_config
from tests.weight_formats.four_bits import IN_EIGHT_BITS, LAYOUTS, Layout, Pair, awq, compressed, gptq, qoq, write_pair

PARTS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",))
PARTS += (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
DOWN = "model.layers.1.mlp.down_proj"


class Recorder:
    """Makes torch's layers, and keeps what it was asked to make them of."""

    def __init__(self) -> None:
        self.made: list[tuple[Weight, Tensor | None]] = []

    def __call__(self, weight: Weight, bias: Tensor | None) -> Linear:
        self.made.append((weight, bias))
        return make_torch_linear(weight, bias)


def load(directory: Path, **options: Any) -> Decoder:
    return load_directory(directory, None, "float32", torch.device("cpu"), LinearOptions(**options))


def dequantised(weight: Weight) -> Tensor:
    return (w4a8 if isinstance(weight, w4a8.Weight4A8) else w4a16).dequantize(weight)


def layers_of(pair: Pair) -> list[tuple[str, ...]]:
    return [tuple(f"model.layers.{layer}.{part}" for part in parts) for layer in range(2) for parts in PARTS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_as_exactly_the_weights_that_it_stands_for(tmp_path: Path, layout: str) -> None:
    pair, recorder = write_pair(tmp_path, LAYOUTS[layout], attention_bias=True), Recorder()
    model = load(pair.quantised, make=recorder)
    assert {type(layer.mlp.down) for layer in model.layers} == {QuantizedLinear}
    assert type(model.lm_head) is DenseLinear
    floats, form = (
        load_file(pair.floats / "model.safetensors"),
        w4a8.Weight4A8 if layout in IN_EIGHT_BITS else w4a16.Weight4,
    )
    for names, (weight, bias) in zip(layers_of(pair), recorder.made[1:], strict=True):
        assert type(weight) is form
        if form is w4a16.Weight4 and weight.zeros is not None:
            assert weight.zeros.shape == weight.scales.shape
        assert torch.equal(dequantised(weight), torch.cat([floats[name + ".weight"] for name in names])), names
        if "self_attn" in names[0]:
            assert torch.equal(bias, torch.cat([floats[name + ".bias"] for name in names]))
        else:
            assert bias is None


@pytest.mark.parametrize("layout, has_zeros", [("compressed-tensors", False), ("gptq-symmetric", False), ("awq", True)])
def test_zero_points_that_are_all_symmetric_are_not_kept(tmp_path: Path, layout: str, has_zeros: bool) -> None:
    recorder = Recorder()
    load(write_pair(tmp_path, LAYOUTS[layout]).quantised, make=recorder)
    assert {weight.zeros is not None for weight, _ in recorder.made[1:]} == {has_zeros}


@pytest.mark.parametrize("stored, group", [(256, 128), (96, 32), (64, 64), (None, 128)])
def test_groups_that_the_kernels_do_not_have_are_cut_into_those_they_have(
    tmp_path: Path, stored: int | None, group: int
) -> None:
    recorder = Recorder()
    sizes = dict(hidden_size=384, num_attention_heads=12, intermediate_size=768) if stored == 96 else {}
    sizes = sizes or dict(hidden_size=256, num_attention_heads=8, intermediate_size=512)
    pair = write_pair(tmp_path, compressed(stored, False), num_key_value_heads=4, **sizes)
    load(pair.quantised, make=recorder)
    floats = load_file(pair.floats / "model.safetensors")
    for names, (weight, _) in zip(layers_of(pair), recorder.made[1:], strict=True):
        assert weight.group == group
        assert torch.equal(dequantised(weight), torch.cat([floats[name + ".weight"] for name in names]))


def test_layers_that_the_config_leaves_alone_are_floats_and_a_layer_of_both_is_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, LAYOUTS["awq"])
    stored, floats = (load_file(path / "model.safetensors") for path in (pair.quantised, pair.floats))

    def as_floats(name: str) -> None:
        for suffix in (".qweight", ".qzeros", ".scales"):
            del stored[name + suffix]
        stored[name + ".weight"] = floats[name + ".weight"]
        save_file(stored, pair.quantised / "model.safetensors")

    as_floats(DOWN)
    model = load(pair.quantised)
    assert type(model.layers[1].mlp.down) is DenseLinear and type(model.layers[0].mlp.down) is QuantizedLinear
    as_floats("model.layers.0.mlp.up_proj")
    with pytest.raises(ConfigError, match="has model.layers.0.mlp.gate_proj quantised and others"):
        load(pair.quantised)


def change(key: str, of: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.update({DOWN + key: of(stored[DOWN + key]).contiguous()})


@pytest.mark.parametrize(
    "layout, damage, message",
    [
        ("gptq", change(".g_idx", lambda t: t.flip(0)), "down_proj.g_idx does not go through the groups in order"),
        ("gptq", change(".bias", lambda t: t + 1), "down_proj.bias is not zero, but by its config.json"),
        ("gptq", change(".qzeros", lambda t: t[:, :4]), r"down_proj.qzeros has shape \[8, 4\]"),
        (
            "gptq",
            change(".qweight", lambda t: t.float()),
            "down_proj.qweight is torch.float32, torch.int32 is expected",
        ),
        (
            "awq",
            change(".scales", lambda t: t[:1]),
            r"down_proj.scales has shape \[1, 128\], config.json asks for \[2, 128\]",
        ),
        ("awq", lambda stored: stored.pop(DOWN + ".qzeros"), "lacks the tensor model.layers.1.mlp.down_proj.qzeros"),
        ("compressed-tensors-zeros", change(".weight_shape", lambda t: t.flip(0)), r"weight_shape says \[256, 128\]"),
        (
            "compressed-tensors-zeros",
            lambda stored: stored.pop(DOWN + ".weight_zero_point"),
            "lacks .*weight_zero_point",
        ),
        ("compressed-tensors", change(".weight_packed", lambda t: t[:, :5]), r"has shape \[128, 5\]"),
        ("qoq-128", change(".s2_scales", lambda t: t[:1]), r"down_proj.s2_scales has shape \[1, 128\]"),
        ("qoq-channel", lambda stored: stored.pop(DOWN + ".s1_szeros"), "lacks .*s1_szeros"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, layout: str, damage: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    pair = write_pair(tmp_path, LAYOUTS[layout])
    stored = load_file(pair.quantised / "model.safetensors")
    damage(stored)
    save_file(stored, pair.quantised / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(pair.quantised)


@pytest.mark.parametrize(
    "layout, columns, message",
    [
        (compressed(128, True), 192, "down has 192 columns, no multiple of its quantisation group of 128"),
        (awq(-1), 144, "down has 4-bit weights with a scale for each 144 columns, a multiple of 32 is supported"),
        (gptq(64), 96, "down has 96 columns, no multiple of its quantisation group of 64"),
        (qoq(-1), 192, "down has 192 columns, .* a multiple of 128 is supported"),
    ],
)
def test_columns_that_do_not_fit_the_groups_are_refused(layout: Layout, columns: int, message: str) -> None:
    source = TensorSource({}, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match=message):
        parse(layout.section).quantization.take(source, "down", 64, columns)


@pytest.mark.parametrize("layout, scheme", [("awq", "w4a16"), ("gptq", "w4a16"), ("qoq-128", "w4a8")])
def test_a_setting_that_contradicts_the_checkpoint_is_refused(tmp_path: Path, layout: str, scheme: str) -> None:
    pair = write_pair(tmp_path, LAYOUTS[layout])
    with pytest.raises(ConfigError, match=f"model.quantization is int8, but the checkpoint is quantised as {scheme};"):
        load(pair.quantised, quantization="int8")


def parse(section: object) -> ModelConfig:
    raw = dict(architectures=["LlamaForCausalLM"], vocab_size=9, hidden_size=8, intermediate_size=8)
    raw |= dict(num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64, quantization_config=section)
    return parse_model_config(json.dumps(raw))


@pytest.mark.parametrize(
    "layout, found",
    [
        (awq(version="gemv"), "awq: version gemv"),
        (awq(bits=8), "awq: 8 bits"),
        (awq(zero_point=False), "awq: without zero points"),
        (awq(group=48), "awq: group_size 48"),
        (gptq(desc_act=True), "gptq: desc_act"),
        (gptq(bits=3), "gptq: 3 bits"),
        (gptq(checkpoint_format="marlin"), "gptq: checkpoint_format marlin"),
        (gptq(is_marlin_format=True), "gptq: is_marlin_format"),
        (gptq(dynamic={"-:.*down": {}}), "gptq: dynamic"),
        (gptq(group=0), "gptq: group_size 0"),
        (qoq(64), "qoq: group_size 64"),
        (qoq(128, wbits=8), "qoq: 8 bits"),
        (compressed(16, True), "compressed-tensors: weight group_size 16 of 4 bits"),
        (
            compressed(128, True, input_activations=ACTIVATIONS),
            "compressed-tensors: activations of 8 bits with weights of 4",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_one_sentence_that_names_it(layout: Layout, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(layout.section)
    assert str(error.value) == (
        f"config.json: quantization_config: the checkpoint is quantised ({found}), which is not supported; "
        f"use a float checkpoint, or {FORMATS}"
    )


def test_activation_order_of_compressed_tensors_is_refused() -> None:
    weights = WEIGHTS | dict(num_bits=4, strategy="group", group_size=128, actorder="group")
    with pytest.raises(ConfigError, match="weight actorder group"):
        parse(quantization_config("pack-quantized", weights=weights))


@pytest.mark.parametrize(
    "section, message",
    [
        (dict(quant_method="awq"), "lacks the key quantization_config.bits"),
        (awq(bits="four").section, "quantization_config.bits is 'four', int is needed"),
        (qoq(128, wbits=None).section, "quantization_config.wbits is null, int is needed"),
    ],
)
def test_a_section_that_is_not_what_it_should_be_is_refused(section: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(section)


KV = dict(type="int", symmetric=False, strategy="token_head", dynamic=True)


@pytest.mark.parametrize("layout", ["compressed-tensors", "awq", "qoq-128"])
@pytest.mark.parametrize("num_bits, dtype", [(8, "int8"), (4, "int4")])
def test_a_checkpoint_says_in_what_type_its_kv_is_kept(layout: str, num_bits: int, dtype: str) -> None:
    section = LAYOUTS[layout].section | dict(kv_cache_scheme=KV | dict(num_bits=num_bits, group_size=None))
    assert parse(section).kv_cache_dtype == dtype
    assert parse(LAYOUTS[layout].section).kv_cache_dtype is None


@pytest.mark.parametrize(
    "scheme",
    [
        KV | dict(num_bits=2),
        KV | dict(num_bits=8, dynamic=False),
        KV | dict(num_bits=8, symmetric=True),
        KV | dict(num_bits=8, strategy="tensor"),
        KV | dict(num_bits=8, type="float"),
        KV | dict(num_bits=8, group_size=64),
        KV,
        "int8",
    ],
)
def test_other_kv_schemes_are_refused(scheme: dict[str, object] | str) -> None:
    with pytest.raises(ConfigError, match="awq: kv_cache_scheme"):
        parse(awq(kv_cache_scheme=scheme).section)
