"""Folds and calibration of every kind of description."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.layers.linear import DenseLinear, Weight
from backend.models.decoder import build_decoder
from backend.models.linears import LinearOptions
from backend.quant.calibration import Calibration, forward_rows, of_layer
from backend.quant.folds import Layer, fold_key, fold_norm, fold_up, fold_value, kinds, norms, obstacles
from backend.quant.layers import quantize_layer
from backend.quant.schemes import W8A8
from backend.quant.smoothing import key_scale
from tests.model.descriptions import CASES
from tests.model.plain_decoder import PlainDecoder, Tensors, random_tensors
from tests.quant.models import random_rows
from tests.quant.test_folds import scales

TEXT = [5, 3, 44, 12, 0, 31, 7, 7, 20]


def layer_of(config: ModelConfig, tensors: Tensors, index: int) -> Layer:
    prefix = f"{config.names.layers}{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def fold_all(layer: Layer, config: ModelConfig) -> None:
    """Every fold that the description allows, by scales from a tenth to ten."""
    for norm, readers in norms(config):
        linears = [name for kind in readers for name in kinds(config)[kind]]
        if norm is not None:
            fold_norm(layer, norm, tuple(linears), scales(config.hidden_size), torch.float32, config.block.norm_offset)
    of_kv = scales(config.num_kv_heads, config.head_dim)
    fold_value(layer, of_kv.repeat_interleave(config.num_heads // config.num_kv_heads, 0).flatten(), config)
    if config.block.gated:
        fold_up(layer, scales(config.intermediate_size), config)
    fold_key(layer, key_scale(of_kv**2, config), config)


@pytest.mark.parametrize("name", CASES)
def test_folds_change_the_weights_and_not_the_logits(name: str) -> None:
    config = CASES[name]
    tensors = random_tensors(config)
    folded = dict(tensors)
    for index in range(config.num_layers):
        layer = layer_of(config, tensors, index)
        before = dict(layer)
        fold_all(layer, of_layer(config, index))
        assert all(not torch.equal(layer[name], before[name]) for name in _folded(config))
        folded |= {f"{config.names.layers}{index}.{name}": tensor for name, tensor in layer.items()}
    expected = PlainDecoder(config, tensors).logits(TEXT)
    assert (PlainDecoder(config, folded).logits(TEXT) - expected).abs().max() <= 1e-4 * expected.abs().max()


def _folded(config: ModelConfig) -> list[str]:
    """Weights that `fold_all` changes."""
    names = config.names.layer
    kept = {names.down} if not config.block.gated else set()
    if names.attention_norm is None and config.block.qk_norm != "none":
        kept |= set(names.qkv[:2])
    if not config.block.gated and norms(config)[-1][0] is None:
        kept |= set(names.gate_up)
    if config.block.gated and norms(config)[-1][0] is None:
        kept.add(names.gate_up[0])
    changed = {*names.qkv, names.out, *names.gate_up, names.down} - kept
    changed |= {norm for norm, _ in norms(config) if norm is not None}
    changed |= {names.q_norm, names.k_norm} if config.block.qk_norm != "none" else set()
    return [name + ".weight" for name in sorted(changed)]


class Recorded(DenseLinear):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.inputs = torch.zeros(0)

    def __call__(self, x: Tensor) -> Tensor:
        self.inputs = x
        return super().__call__(x)


@pytest.mark.parametrize("name", CASES)
def test_calibration_sees_the_inputs_of_the_whole_model(name: str) -> None:
    config = CASES[name]
    tensors, rows = random_tensors(config), random_rows(config.vocab_size, (3, 12))
    made: list[Recorded] = []

    def make(weight: Weight, bias: Tensor | None) -> Recorded:
        made.append(Recorded(weight, bias))
        return made[-1]

    options = LinearOptions(make=make)
    model = build_decoder(config, tensors, 12, torch.float32, torch.device("cpu"), options)
    forward_rows(model, rows)
    calibration = Calibration(config, tensors[config.names.embedding + ".weight"], rows)
    for index in range(config.num_layers):
        found = calibration.advance(index, layer_of(config, tensors, index))
        linears = made[1 + 4 * index : 5 + 4 * index]  # the first of all is the output head
        for inputs, linear in zip((found.qkv, found.out, found.gate_up, found.down), linears, strict=True):
            torch.testing.assert_close(inputs.max_abs, linear.inputs.abs().amax(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_quantised_with_little_error(name: str) -> None:
    config = CASES[name]
    tensors, rows = random_tensors(config), random_rows(config.vocab_size, (4, 30))
    calibration = Calibration(config, tensors[config.names.embedding + ".weight"], rows)
    layer = layer_of(config, tensors, 0)
    inputs = calibration.advance(0, layer)
    made = quantize_layer(layer, inputs, of_layer(config, 0), W8A8(), torch.float32, int4_keys=True)
    assert set(made.errors) == {"qkv", "out", "gate_up", "down"}
    assert all(errors.written < 0.03 for errors in made.errors.values())
    for names in kinds(config).values():
        assert all(made.tensors[name + ".weight"].dtype == torch.int8 for name in names)


def test_what_cannot_be_folded_is_named() -> None:
    assert obstacles(CASES["Llama"]) == obstacles(CASES["LayerNorm with biases"]) == []
    attention, mlp = obstacles(CASES["norms of outputs only"])
    assert attention.startswith(
        "the inputs of self_attn.q_proj and self_attn.k_proj and self_attn.v_proj are not smoothed"
    )
    assert "no norm before them" in mlp and "mlp.gate_proj and mlp.up_proj" in mlp
    (down,) = obstacles(CASES["gelu"])
    assert "mlp.down_proj" in down and "no gate" in down
    parallel = msgspec.structs.replace(CASES["parallel, one norm"])
    assert obstacles(parallel) == []
