"""Tiny random decoders, one for each field of a Block, and some that combine them as families do."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from backend.architectures.description import (
    LayerConfig,
    LayerNames,
    ModelConfig,
    QueryScaling,
    RopeConfig,
    TensorNames,
)
from backend.layers.linear import MakeLinear, make_torch_linear
from backend.models.decoder import Decoder, build_decoder
from backend.worker.native_tier import NativeTier, PackLinears
from backend.worker.tier import kv_layout
from backend.worker.torch_tier import TorchTier
from tests.model.driver import Driver
from tests.native.families import LONGEST, VOCAB
from tests.native.harness import CPU, Format, drive, linear_options

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, NUM_LAYERS = 44, 64, 6, 2, 20, 3

Change = Callable[[ModelConfig], ModelConfig]
OUT_NORMS = LayerNames(attention_out_norm="attention_out", mlp_out_norm="mlp_out")
ONLY_OUT_NORMS = replace(OUT_NORMS, attention_norm=None, mlp_norm=None)
ONE_NORM = LayerNames(mlp_norm=None)
FUSED = LayerNames(qkv=("qkv",), gate_up=("gate_up",))
WITHOUT_GATE = LayerNames(gate_up=("up",))


def of_block(**fields: Any) -> Change:
    return lambda config: replace(config, block=replace(config.block, **fields))


def of_names(layer: LayerNames) -> Change:
    return lambda config: replace(config, names=TensorNames(layer=layer))


def of_layers(*layers: LayerConfig) -> Change:
    """The layers take these in turn."""
    return lambda config: replace(config, layers=tuple(layers[i % len(layers)] for i in range(config.num_layers)))


def of_ropes(*ropes: RopeConfig) -> Change:
    return lambda config: replace(config, ropes=ropes)


HALF_ROTATED = of_ropes(RopeConfig(rotary_dim=10))
TWO_ROPES = of_ropes(RopeConfig(theta=100.0), RopeConfig(theta=5000.0, kind="linear", factor=4.0))
SHORT = LayerConfig(window=50)

FIELDS: dict[str, list[Change]] = {
    "layer norm": [of_block(norm="layer")],
    "layer norm with bias": [of_block(norm="layer", norm_bias=True)],
    "rms norm with bias": [of_block(norm_bias=True)],
    "norm offset": [of_block(norm_offset=1.0)],
    "norms of heads": [of_block(qk_norm="head")],
    "norms of rows": [of_block(qk_norm="row")],
    "layer norms of heads": [of_block(norm="layer", qk_norm="head")],
    "layer norms of rows": [of_block(norm="layer", qk_norm="row")],
    "parallel, one norm": [of_block(parallel=True), of_names(ONE_NORM)],
    "parallel, two norms": [of_block(parallel=True)],
    "out norms": [of_names(OUT_NORMS)],
    "only out norms": [of_names(ONLY_OUT_NORMS)],
    "gelu": [of_block(activation="gelu")],
    "gelu_tanh": [of_block(activation="gelu_tanh")],
    "silu without gate": [of_block(gated=False), of_names(WITHOUT_GATE)],
    "gelu without gate": [of_block(gated=False, activation="gelu"), of_names(WITHOUT_GATE)],
    "biases": [of_block(qkv_bias=True, out_bias=True, mlp_bias=True)],
    "neighbours rotated": [of_block(rope_interleaved=True)],
    "half rotated": [HALF_ROTATED],
    "half rotated, neighbours": [HALF_ROTATED, of_block(rope_interleaved=True)],
    "two ropes": [TWO_ROPES, of_layers(LayerConfig(rope=0), LayerConfig(rope=1))],
    "layers without rope": [of_layers(LayerConfig(), LayerConfig(rope=None))],
    "query scaling": [of_block(query_scaling=QueryScaling(0.5, 16))],
    "attention scale": [of_block(attention_scale=0.4)],
    "attention softcap": [of_block(attention_softcap=1.5)],
    "attention sinks": [of_block(attention_sinks=True)],
    "attention sinks, softcap and windows": [
        of_block(attention_sinks=True, attention_softcap=2.0),
        of_layers(SHORT, LayerConfig()),
    ],
    "logit softcap": [of_block(logit_softcap=3.0)],
    "logit scale": [of_block(logit_scale=0.25)],
    "embedding scale": [of_block(embedding_scale=6.0)],
    "residual scale": [of_block(residual_scale=0.4)],
    "residual scale, out norms": [of_block(residual_scale=0.4), of_names(OUT_NORMS)],
}
FAMILIES: dict[str, list[Change]] = {
    "Gemma 2": [
        of_block(norm_offset=1.0, activation="gelu_tanh", attention_softcap=5.0, logit_softcap=4.0),
        of_block(embedding_scale=HIDDEN**0.5, attention_scale=0.3),
        of_names(OUT_NORMS),
        of_layers(SHORT, LayerConfig()),
    ],
    "Gemma 3": [
        of_block(norm_offset=1.0, activation="gelu_tanh", qk_norm="head", embedding_scale=HIDDEN**0.5),
        of_names(OUT_NORMS),
        TWO_ROPES,
        of_layers(SHORT, LayerConfig(rope=1)),
    ],
    "OLMo 2": [of_block(qk_norm="row"), of_names(ONLY_OUT_NORMS)],
    "OLMo 3": [of_block(qk_norm="row"), of_names(ONLY_OUT_NORMS), of_layers(SHORT, LayerConfig())],
    "Cohere 2": [
        of_block(norm="layer", parallel=True, rope_interleaved=True, logit_scale=0.5),
        of_names(ONE_NORM),
        of_layers(SHORT, LayerConfig(rope=None)),
    ],
    "StarCoder 2": [
        of_block(norm="layer", norm_bias=True, activation="gelu_tanh", gated=False),
        of_block(qkv_bias=True, out_bias=True, mlp_bias=True),
        of_names(WITHOUT_GATE),
        of_layers(SHORT),
    ],
    "Phi-4": [HALF_ROTATED, of_names(FUSED)],
    "Granite": [of_block(embedding_scale=3.0, residual_scale=0.3, attention_scale=0.1, logit_scale=0.5)],
    "SmolLM3": [of_layers(LayerConfig(), LayerConfig(), LayerConfig(rope=None))],
    "NeoX": [
        of_block(norm="layer", norm_bias=True, parallel=True, activation="gelu", gated=False),
        of_block(qkv_bias=True, out_bias=True, mlp_bias=True),
        of_names(replace(WITHOUT_GATE, qkv=("query_key_value",))),
        HALF_ROTATED,
    ],
    "sinks and query scaling": [
        of_block(attention_sinks=True, qkv_bias=True, query_scaling=QueryScaling(0.3, 32)),
        of_layers(SHORT, LayerConfig()),
    ],
}
ALL = FIELDS | FAMILIES


def plain(max_position: int = LONGEST, num_layers: int = NUM_LAYERS) -> ModelConfig:
    return ModelConfig(
        "test", VOCAB, HIDDEN, INTERMEDIATE, num_layers, HEADS, KV_HEADS, HEAD_DIM, max_position, False,
        (LayerConfig(),) * num_layers, (RopeConfig(),), None, (), None, None,
    )  # fmt: skip


def config_of(name: str, **sizes: int) -> ModelConfig:
    config = plain(**sizes)
    for change in ALL[name]:
        config = change(config)
    return config


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint whose numbers bfloat16 holds."""
    rng, block, names, tensors = torch.Generator().manual_seed(seed), config.block, config.names.layer, {}

    def put(name: str, *shape: int, scale: float, middle: float = 0.0) -> None:
        tensors[name] = (middle + scale * torch.randn(shape, generator=rng)).bfloat16().float()

    def linear(parts: tuple[str, ...], rows: tuple[int, ...], columns: int, has_bias: bool) -> None:
        for name, n in zip(parts, (sum(rows),) if len(parts) == 1 else rows, strict=True):
            put(name + ".weight", n, columns, scale=1.5 * columns**-0.5)
            if has_bias:
                put(name + ".bias", n, scale=0.5)

    def norm(name: str | None, size: int, has_bias: bool = block.norm_bias) -> None:
        if name is not None:
            put(name + ".weight", size, scale=0.3, middle=1 - block.norm_offset)
            if has_bias:
                put(name + ".bias", size, scale=0.3)

    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    put(config.names.embedding + ".weight", config.vocab_size, config.hidden_size, scale=1.0)
    linear((config.names.head,), (config.vocab_size,), config.hidden_size, False)
    norm(config.names.norm, config.hidden_size)
    for index in range(config.num_layers):
        at = f"{config.names.layers}{index}."
        linear(tuple(at + each for each in names.qkv), (q, kv, kv), config.hidden_size, block.qkv_bias)
        linear((at + names.out,), (config.hidden_size,), q, block.out_bias)
        inputs = (config.intermediate_size,) * (2 if block.gated else 1)
        linear(tuple(at + each for each in names.gate_up), inputs, config.hidden_size, block.mlp_bias)
        linear((at + names.down,), (config.hidden_size,), config.intermediate_size, block.mlp_bias)
        for each in (names.attention_norm, names.attention_out_norm, names.mlp_norm, names.mlp_out_norm):
            norm(None if each is None else at + each, config.hidden_size)
        if block.qk_norm != "none":
            norm(at + names.q_norm, config.head_dim if block.qk_norm == "head" else q, has_bias=False)
            norm(at + names.k_norm, config.head_dim if block.qk_norm == "head" else kv, has_bias=False)
        if block.attention_sinks:
            put(at + names.sinks, config.num_heads, scale=1.5)
    return tensors


def build(config: ModelConfig, form: Format, make: MakeLinear) -> Decoder:
    options = linear_options(form, make)
    return build_decoder(config, random_tensors(config), config.max_position, getattr(torch, form.dtype), CPU, options)


def native(config: ModelConfig, library: CDLL, form: Format = Format(), **options: Any) -> Driver:  # noqa: B008
    """`options` go to the Driver."""
    model = build(config, form, PackLinears(library))
    return drive(NativeTier(model, library, 32, form.kv_format), model, library, 32, **options)


def reference(config: ModelConfig, form: Format = Format(), **options: Any) -> Driver:  # noqa: B008
    model = build(config, form, make_torch_linear)
    return drive(TorchTier(model, kv_layout(config, 32, model.dtype)), model, None, 32, **options)
