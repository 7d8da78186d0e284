"""config.json: what was published is read, and what is not known is refused in one sentence with its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.api.errors import ConfigError
from backend.architectures.registry import read_config
from backend.models.linears import LinearOptions
from backend.models.loader import open_directory
from tests.families import tiny
from tests.families.published import CONFIGS
from tests.model.hostile.readers import fault_of_sentence

HOSTILE = (True, "much", -1, 0, 1e400, float("nan"), 10**30, [[1]], {"a": {"b": [1]}}, ["x"], {})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read(name: str) -> None:
    content = CONFIGS[name]
    config = read_config(content)
    text = content.get("text_config", content)
    assert (config.num_layers, config.vocab_size) == (text["num_hidden_layers"], text["vocab_size"])
    assert len(config.layers) == config.num_layers and config.head_dim >= 64


def test_each_setting_of_gemma_3_has_its_place() -> None:
    config = read_config(CONFIGS["Gemma-3-1B"])
    assert config.windows == tuple(None if layer % 6 == 5 else 512 for layer in range(26))
    assert [config.ropes[layer.rope or 0].theta for layer in config.layers[4:6]] == [1e4, 1e6]
    assert (config.block.embedding_scale, config.attention_scale) == (1152**0.5, 1 / 16)
    assert (config.block.attention_softcap, config.block.logit_softcap, config.tied_embeddings) == (0.0, 0.0, True)


def test_only_the_layers_of_olmo_3_that_see_everything_scale_positions() -> None:
    config = read_config(CONFIGS["OLMo-3-7B"])
    kinds = [(layer.window, config.ropes[layer.rope or 0].kind) for layer in config.layers[:4]]
    assert kinds == [(4096, "default")] * 3 + [(None, "yarn")]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_that_is_not_known_is_refused_unless_it_is_off(name: str) -> None:
    architecture = CONFIGS[name]["architectures"][0]
    for value in (True, 0.5, "swirl", [1], 1):
        with pytest.raises(ConfigError, match=f"attention_swirl is .*, which is not known of {architecture}") as error:
            read_config(CONFIGS[name] | {"attention_swirl": value})
        assert fault_of_sentence(str(error.value)) is None
    for value in (None, False, [], {}, ""):
        read_config(CONFIGS[name] | {"attention_swirl": value})


@pytest.mark.parametrize(
    "name, changes, sentence",
    [
        ("Gemma-3-1B", dict(use_bidirectional_attention=True), "use_bidirectional_attention is true"),
        ("Gemma-3-1B", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
        ("Gemma-3-1B", dict(rope_parameters=dict(full_attention={}, dense={})), "rope_parameters.dense stands beside"),
        (
            "Gemma-2-2B",
            dict(hidden_activation="relu"),
            "hidden_activation relu is not supported here; supported are silu",
        ),
        ("Gemma-2-2B", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar is 0"),
        ("Granite-3.3-2B", dict(logits_scaling=-8.0), "logits_scaling is -8.0"),
        ("Command-R7B", dict(logit_scale=0), "logit_scale is 0"),
        ("Command-R7B", dict(use_qk_norm=True), "use_qk_norm is true"),
        ("Command-R7B", dict(use_parallel_block=False), "use_parallel_block false is not supported here"),
        ("Granite-4.0-Micro", dict(layer_types=["rwkv"] * 40), "layer type rwkv is not supported; supported are mamba"),
        (
            "Granite-4.0-H-Tiny",
            dict(mamba_d_head=60),
            "mamba_n_heads 48 times mamba_d_head 60 is not mamba_expand times",
        ),
        ("Granite-4.0-H-Tiny", dict(mamba_n_groups=5), "48 recurrent value heads are no multiple of 5 key heads"),
        (
            "Granite-4.0-H-Tiny",
            dict(time_step_limit=[0.1, 0.0]),
            "time_step_limit .* is not supported here; two numbers",
        ),
        (
            "Nemotron-Nano-9B-v2",
            dict(hybrid_override_pattern="MX*"),
            "layers_block_type: X is not supported; supported are",
        ),
        (
            "Nemotron-Nano-9B-v2",
            dict(num_hidden_layers=55),
            "num_hidden_layers 55 is not supported here; supported is 56",
        ),
        ("Nemotron-3-Nano-30B-A3B", dict(moe_latent_size=1024), "moe_latent_size 1024 is not supported here; null is"),
        ("Qwen3-Next-80B-A3B", dict(attn_output_gate=False), "attn_output_gate false is not supported here"),
        ("LFM2-350M", dict(block_ffn_dim_multiplier=1e30), "block_ffn_dim_multiplier .* it makes the mlp .* wide"),
        ("Granite-4.0-Micro", dict(position_embedding_type="alibi"), "position_embedding_type alibi is not supported"),
        ("Phi-4-mini", dict(partial_rotary_factor=0.5), "rope_scaling.long_factor .* it has 48 numbers, 32 are needed"),
        ("Phi-4-mini", dict(full_attn_mod=2), "full_attn_mod 2 is not supported here; supported is 1"),
        ("SmolLM3-3B", dict(no_rope_layers=[1]), "no_rope_layers has 1 entries for num_hidden_layers 36"),
        ("SmolLM3-3B", dict(layer_types=["chunked_attention"] * 36), "layer type chunked_attention is not supported"),
        ("OLMo-2-1B", dict(clip_qkv=8.0), "clip_qkv is 8.0"),
        ("Mistral-Nemo", dict(layer_types=["sliding_attention"] * 40), "layer_types .* MinistralForCausalLM reads it"),
        ("Ministral-3-3B", dict(rope_parameters=None), "lacks the key rope_parameters"),
        ("Qwen3-0.6B", dict(architectures=["Qwen4ForCausalLM"]), "near it are Qwen3ForCausalLM"),
        ("Qwen3-0.6B", dict(hidden_act="xielu"), "hidden_act xielu is not supported here"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        read_config(CONFIGS[name] | changes)
    assert fault_of_sentence(str(error.value)) is None


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_value_of_any_key_ends_in_one_sentence_or_is_read(name: str) -> None:
    content = CONFIGS[name]
    places = [(content, key) for key in content]
    places += [(content[key], inner) for key in content if isinstance(content[key], dict) for inner in content[key]]
    for holder, key in places:
        kept = holder[key]
        for value in HOSTILE:
            holder[key] = value
            try:
                read_config(content)
            except ConfigError as error:
                assert fault_of_sentence(str(error)) is None, f"{key} = {value!r}: {error}"
            finally:
                holder[key] = kept


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_tensor_that_lacks_or_is_too_many_or_has_another_shape_is_told(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint(name)
    weights = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    layer = min(key for key in weights if ".layers.1." in key or "layers.1." in key)

    def refusal() -> str:
        with pytest.raises(ConfigError) as error:
            open_directory(tmp_path).build(None, torch.float32, torch.device("cpu"), LinearOptions())
        assert fault_of_sentence(str(error.value)) is None
        return str(error.value)

    def write(changes: dict[str, torch.Tensor | None]) -> None:
        held = {key: value for key, value in (weights | changes).items() if value is not None}
        save_file(held, tmp_path / "model.safetensors", {"format": "pt"})

    write({layer: None})
    assert f"lacks the tensor {layer}" in refusal()
    write({"model.layers.1.mlp.swirl.weight": torch.ones(1)})
    assert "model.layers.1.mlp.swirl.weight" in refusal()
    write({layer: torch.ones(3, 5)})
    assert f"tensor {layer} has shape [3, 5]" in refusal()


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 48**0.5), (torch.bfloat16, 6.9375)])
def test_the_factor_of_gemma_s_embedding_is_one_of_the_model_s_type(
    dtype: torch.dtype, scale: float, checkpoint: Callable[..., Path]
) -> None:
    model = open_directory(checkpoint("gemma")).build(None, dtype, torch.device("cpu"), LinearOptions())
    assert model.config.block.embedding_scale == pytest.approx(scale, rel=1e-7)
