"""Small descriptions of decoders, each with one field, or a few that belong together, other than Llama's."""

from __future__ import annotations

from typing import Any

import msgspec

from backend.architectures.description import (
    Block,
    LayerConfig,
    LayerNames,
    ModelConfig,
    QueryScaling,
    RopeConfig,
    TensorNames,
)

PARALLEL = LayerNames(mlp_norm=None)
POST_NORMS = LayerNames(
    attention_norm=None,
    attention_out_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
)
FOUR_NORMS = LayerNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
FUSED = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
UNGATED = LayerNames(gate_up=("mlp.up_proj",))
FULL = LayerConfig()


def description(
    layers: tuple[LayerConfig, ...] = (FULL, FULL),
    ropes: tuple[RopeConfig, ...] = (RopeConfig(theta=100.0),),
    names: LayerNames = LayerNames(),  # noqa: B008 (immutable)
    tied: bool = False,
    **block: Any,
) -> ModelConfig:
    return ModelConfig(
        architecture="described",
        vocab_size=50,
        hidden_size=48,
        intermediate_size=64,
        num_layers=len(layers),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=64,
        tied_embeddings=tied,
        layers=layers,
        ropes=ropes,
        dtype=None,
        eos_ids=(),
        quantization=None,
        kv_cache_dtype=None,
        block=msgspec.structs.replace(Block(norm_eps=1e-3), **block),
        names=TensorNames(layer=names),
    )


CASES: dict[str, ModelConfig] = {
    "Llama": description(),
    "fused projections": description(names=FUSED, qkv_bias=True, mlp_bias=True),
    "LayerNorm": description(norm="layer"),
    "LayerNorm with biases": description(norm="layer", norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True),
    "RMSNorm with biases": description(norm_bias=True),
    "norm offset": description(norm_offset=1.0, qk_norm="head"),
    "norms of outputs only": description(names=POST_NORMS),
    "norms of inputs and outputs": description(names=FOUR_NORMS),
    "parallel, one norm": description(names=PARALLEL, parallel=True, residual_scale=0.7),
    "parallel, two norms": description(parallel=True, norm="layer", norm_bias=True),
    "norms of heads": description(qk_norm="head"),
    "LayerNorms of heads": description(qk_norm="head", norm="layer"),
    "norms of rows": description(qk_norm="row"),
    "norms of rows and outputs": description(qk_norm="row", names=POST_NORMS),
    "residual scale": description(residual_scale=0.22),
    "embedding scale": description(embedding_scale=6.9),
    "embedding scale, tied": description(embedding_scale=6.9, tied=True),
    "logit scale": description(logit_scale=0.125),
    "logit soft cap": description(logit_scale=3.0, logit_softcap=5.0),
    "gated gelu": description(activation="gelu"),
    "gated gelu_tanh": description(activation="gelu_tanh"),
    "gelu": description(activation="gelu", gated=False, names=UNGATED, mlp_bias=True),
    "gelu_tanh": description(activation="gelu_tanh", gated=False, names=UNGATED),
    "silu without a gate": description(gated=False, names=UNGATED),
    "two ropes and windows": description(
        layers=(LayerConfig(window=4), LayerConfig(rope=1), LayerConfig(window=7)),
        ropes=(RopeConfig(theta=100.0), RopeConfig(theta=7.0)),
    ),
    "a layer without rope": description(layers=(LayerConfig(window=5), LayerConfig(rope=None))),
    "partial rope": description(ropes=(RopeConfig(theta=100.0, rotary_dim=6),)),
    "interleaved rope": description(rope_interleaved=True),
    "partial interleaved rope": description(ropes=(RopeConfig(theta=100.0, rotary_dim=10),), rope_interleaved=True),
    "partial rope and norms of heads": description(ropes=(RopeConfig(theta=100.0, rotary_dim=8),), qk_norm="head"),
    "query scaling": description(query_scaling=QueryScaling(beta=0.4, original_max_position=5)),
    "attention scale": description(attention_scale=0.6),
    "attention soft cap": description(attention_scale=2.0, attention_softcap=1.5),
    "attention sinks": description(attention_sinks=True, layers=(LayerConfig(window=5), FULL)),
    "sinks and a soft cap": description(attention_sinks=True, attention_softcap=2.0),
}
