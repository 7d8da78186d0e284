"""Numbers of a config.json: each reaches the model with the value that it has there, not with the one that most models have."""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Any

import pytest

from backend.api import ConfigError
from backend.architectures.description import ModelConfig
from backend.models.config import parse_model_config

RAW: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=331,
    hidden_size=84,
    intermediate_size=172,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=18,
    max_position_embeddings=777,
    rms_norm_eps=3e-4,
    rope_theta=1234.0,
    eos_token_id=[7, 9],
    dtype="float16",
)
KV_SCHEME = dict(type="int", symmetric=False, strategy="token_head", dynamic=True, num_bits=4)


def parsed(**changes: object) -> ModelConfig:
    content = {key: value for key, value in (RAW | changes).items() if value is not None}
    return parse_model_config(json.dumps(content))


def test_each_number_of_a_config_json_reaches_the_model() -> None:
    config = parsed()
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (331, 84, 172)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (5, 6, 2, 18)
    assert (config.max_position, config.block.norm_eps, config.ropes[0].theta) == (777, 3e-4, 1234.0)
    assert (config.eos_ids, config.dtype) == ((7, 9), "float16")


@pytest.mark.parametrize(
    "missing, field, value",
    [
        ("num_key_value_heads", "num_kv_heads", 6),
        ("head_dim", "head_dim", 14),
        ("rms_norm_eps", "block.norm_eps", 1e-6),
        ("eos_token_id", "eos_ids", ()),
        ("dtype", "dtype", None),
    ],
)
def test_a_number_that_is_missing_is_what_transformers_takes(missing: str, field: str, value: object) -> None:
    assert attrgetter(field)(parsed(**{missing: None})) == value


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_the_base_of_rotary_positions_is_read_wherever_it_stands(key: str, kind: str) -> None:
    for section in ({kind: "default"}, {kind: "linear", "factor": 3.0}):
        outside = parsed(**{key: section}).ropes[0]
        inside = parsed(**{key: section | {"rope_theta": 99.0}}).ropes[0]
        nowhere = parsed(rope_theta=None, **{key: section}).ropes[0]
        assert (outside.theta, inside.theta, nowhere.theta) == (1234.0, 99.0, 10_000.0)
        assert outside.factor == section.get("factor", 1.0)


def test_each_number_of_llama_3_s_scaling_has_its_place() -> None:
    section = dict(rope_type="llama3", rope_theta=55.0, factor=8.0)
    section |= dict(low_freq_factor=1.5, high_freq_factor=4.5, original_max_position_embeddings=64)
    rope = parsed(rope_parameters=section).ropes[0]
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 55.0, 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (1.5, 4.5, 64)


def with_kv(scheme: object) -> ModelConfig:
    awq = dict(quant_method="awq", bits=4, group_size=128, version="gemm", zero_point=True)
    return parsed(quantization_config=awq | dict(kv_cache_scheme=scheme))


@pytest.mark.parametrize("bits, dtype", [(8, "int8"), (4, "int4")])
def test_a_kv_cache_that_is_quantised_as_ours_is_taken(bits: int, dtype: str) -> None:
    assert with_kv(KV_SCHEME | dict(num_bits=bits)).kv_cache_dtype == dtype
    assert with_kv(None).kv_cache_dtype is None


@pytest.mark.parametrize(
    "change",
    [
        dict(symmetric=True),
        dict(type="float"),
        dict(strategy="tensor"),
        dict(dynamic=False),
        dict(num_bits=5),
        dict(num_bits=True),
        dict(group_size=32),
    ],
)
def test_a_kv_cache_that_is_quantised_in_another_way_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="kv_cache_scheme"):
        with_kv(KV_SCHEME | change)
