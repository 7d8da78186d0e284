#!/usr/bin/env python3
"""Write a Hugging Face checkpoint directory with random weights: for tests, and benchmarks that need only the shape.

    .venv/bin/python -m tools.make_random_model DIR --shape M
    .venv/bin/python -m tools.make_random_model DIR --family qwen3 --seed 7 --set num_hidden_layers=4

transformers provides the tensor names, shapes and the config.json, so the result is what transformers itself would
write. The values come from one generator in the order of the names: the same seed gives the same files. Matrices are
scaled by the square root of their fan-in, which keeps activations near 1 and makes attention matter, unlike
transformers' own initialisation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

TINY: dict[str, Any] = dict(
    vocab_size=131,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
    dtype="float32",
)
# A small theta, so that even tiny heads have frequencies in all three bands of the scaling.
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
# name -> (model type, architecture, what differs from TINY)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "llama3": ("llama", "LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("mistral", "MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", {"sliding_window": 24}),
    "phi3": ("phi3", "Phi3ForCausalLM", {}),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", {}),
    "granite": ("granite", "GraniteForCausalLM", {}),
    "qwen3_5": (
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
        },
    ),
    "lfm2": ("lfm2", "Lfm2ForCausalLM", {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False}),
}
# The shapes that the benchmarks measure.
SHAPES: dict[str, dict[str, Any]] = {
    "S": dict(
        hidden_size=288,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=768,
        vocab_size=32_000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ),
    "M": dict(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49_152,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
    ),
    "L": dict(
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        vocab_size=32_000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ),
}
# A mixture of experts: 1.0 B weights, of which a token reads 0.32 B; for the family qwen3_moe.
SHAPES["E"] = dict(
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=3072,
    moe_intermediate_size=384,
    num_experts=32,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    vocab_size=32_000,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
# Hybrids of the sizes of Qwen3.5-0.8B, for the family qwen3_5, and of LFM2-350M, for lfm2.
SHAPES["H"] = dict(
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    intermediate_size=3584,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    vocab_size=248_320,
    max_position_embeddings=262_144,
    rope_parameters=dict(rope_type="default", rope_theta=10_000_000.0, partial_rotary_factor=0.25),
    tie_word_embeddings=True,
    dtype="bfloat16",
)
SHAPES["F"] = dict(
    hidden_size=1024,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=8,
    intermediate_size=6656,
    block_auto_adjust_ff_dim=True,
    full_attn_idxs=[2, 5, 8, 10, 12, 14],
    vocab_size=65_536,
    max_position_embeddings=128_000,
    rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0),
    tie_word_embeddings=True,
    dtype="bfloat16",
)
# M for long contexts: the positions of its rope scaled as Llama 3.1 scales them.
SHAPES["M-long"] = SHAPES["M"] | dict(
    max_position_embeddings=40_960,
    rope_parameters=LLAMA3_ROPE | dict(rope_theta=10_000.0, factor=20.0, original_max_position_embeddings=2048),
)

SHAPE_HELP = "a size of the benchmarks; tiny without it"


def make_random_model(
    directory: str | Path,
    family: str = "llama",
    seed: int = 0,
    shape: str | None = None,
    num_shards: int = 1,
    tokenizer_from: str | Path | None = None,
    **overrides: Any,
) -> Path:
    """Write config.json, generation_config.json and safetensors to `directory`, and return it.

    `shape` S, M, M-long, L, E, H or F sets the sizes, else they are tiny; `overrides` are keys of config.json. `num_shards` > 1
    writes an index. `tokenizer_from`: a checkpoint directory whose tokenizer is copied. ValueError for an unknown name.
    """
    directory = Path(directory)
    config = make_config(family, shape, overrides)
    write_model(directory, config, random_weights(config, seed), num_shards)
    for path in Path(tokenizer_from).glob("*") if tokenizer_from else ():
        if path.name.startswith(("tokenizer", "chat_template", "special_tokens", "vocab", "merges")):
            shutil.copy(path, directory)
    return directory


def random_weights(config: PretrainedConfig, seed: int) -> dict[str, Tensor]:
    """Tensors by their checkpoint names, in the config's dtype; a tied output head is left out."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stored = revert_weight_conversion(model, model.state_dict())  # experts apart, as published checkpoints have them
    named = {
        name: tensor for name, tensor in stored.items() if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    return random_values(named, config.dtype, seed)


def random_values(named: Mapping[str, Tensor], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Other values for tensors, of the same names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, tensor.shape, generator).to(dtype) for name, tensor in sorted(named.items())}


def write_model(directory: Path, config: PretrainedConfig, weights: dict[str, Tensor], num_shards: int = 1) -> None:
    """Write a checkpoint directory without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    save_weights(weights, directory, num_shards)
    config.save_pretrained(directory)
    GenerationConfig(eos_token_id=config.eos_token_id, bos_token_id=config.bos_token_id).save_pretrained(directory)


def save_weights(weights: dict[str, Tensor], directory: Path, num_shards: int = 1) -> None:
    """Write model.safetensors, or `num_shards` files and their index."""
    if num_shards == 1:
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        return
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard::num_shards]
        save_file({name: weights[name] for name in part}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def make_config(family: str, shape: str | None, overrides: dict[str, Any]) -> PretrainedConfig:
    """`shape` sets the sizes, else they are tiny; `overrides` are keys of config.json. ValueError for an unknown name."""
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; use one of {', '.join(FAMILIES)}")
    if shape is not None and shape not in SHAPES:
        raise ValueError(f"shape is {shape!r}; use one of {', '.join(SHAPES)}, or leave it out for a tiny model")
    model_type, architecture, differences = FAMILIES[family]
    values = TINY | differences | (SHAPES[shape] if shape else {}) | overrides
    config = AutoConfig.for_model(model_type, **values)
    config.architectures = [architecture]
    return config


def read_overrides(items: Iterable[str]) -> dict[str, Any]:
    """KEY=JSON, or KEY=TEXT, of a command line."""
    overrides = {}
    for item in items:
        key, _, text = item.partition("=")
        try:
            overrides[key] = json.loads(text)
        except json.JSONDecodeError:
            overrides[key] = text
    return overrides


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith(("norm.weight", "norm_f.weight", ".D")):
        return 1 + 0.1 * values
    if name.endswith(("A_log", "dt_bias")):
        return _of_states(name, 0.5 + 0.5 * torch.erf(values / 2**0.5))
    if name.endswith("bias"):
        return 0.1 * values
    if name.endswith("embed_tokens.weight"):
        return 0.5 * values
    return values.mul_(1.5 / shape[-1] ** 0.5)


def _of_states(name: str, share: Tensor) -> Tensor:
    """Decay and steps as trained models start with them (arXiv:2405.21060): states neither vanish nor grow. share: 0 to 1."""
    if name.endswith("A_log"):
        return (1 + 15 * share).log()
    step = 0.001 * 100**share
    return step + (-torch.expm1(-step)).log()  # softplus makes it the step again


def main(
    directory: Path,
    family: Annotated[Literal[tuple(FAMILIES)], typer.Option()] = "llama",  # type: ignore[valid-type]
    shape: Annotated[Literal[tuple(SHAPES)] | None, typer.Option(help=SHAPE_HELP)] = None,  # type: ignore[valid-type]
    seed: int = 0,
    num_shards: int = 1,
    tokenizer_from: Annotated[Path | None, typer.Option(help="checkpoint directory whose tokenizer is copied")] = None,
    set: Annotated[list[str] | None, typer.Option(metavar="KEY=JSON", help="a key of config.json")] = None,
) -> None:
    """Write a Hugging Face checkpoint directory with random weights."""
    overrides = read_overrides(set or [])
    make_random_model(directory, family, seed, shape, num_shards, tokenizer_from, **overrides)


if __name__ == "__main__":
    typer.run(main)
