"""Every fold leaves the float model as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.models.config import read_model_config
from backend.quant.folds import Layer, fold_key, fold_norm, fold_up, fold_value
from tests.quant.models import (
    DOWN,
    FAMILIES,
    GATE,
    INPUT_NORM,
    OUT,
    POST_NORM,
    UP,
    K,
    Q,
    V,
    logits_of,
    random_rows,
)
from tools.make_random_model import make_random_model


def scales(*shape: int) -> Tensor:
    """Random scales from a tenth to ten."""
    return 10 ** (2 * torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) - 1)


def fold_norms(layer: Layer, config: ModelConfig) -> None:
    fold_norm(layer, INPUT_NORM, (Q, K, V), scales(config.hidden_size), torch.float32)
    fold_norm(layer, POST_NORM, (GATE, UP), scales(config.hidden_size), torch.float32)


def fold_values(layer: Layer, config: ModelConfig) -> None:
    of_kv = scales(config.num_kv_heads, config.head_dim)
    fold_value(layer, of_kv.repeat_interleave(config.num_heads // config.num_kv_heads, 0).flatten(), config)


def fold_ups(layer: Layer, config: ModelConfig) -> None:
    fold_up(layer, scales(config.intermediate_size), config)


def fold_keys(layer: Layer, config: ModelConfig) -> None:
    heads = 1 if config.block.qk_norm != "none" else config.num_kv_heads
    fold_key(layer, scales(heads, config.head_dim // 2).repeat(config.num_kv_heads // heads, 2), config)


FOLDS = {"norms": (fold_norms, 6), "values": (fold_values, 2), "ups": (fold_ups, 2), "keys": (fold_keys, 2)}


def folded(source: Path, target: Path, fold: Callable[[Layer, ModelConfig], None]) -> set[str]:
    """Writes the folded model to `target`; the names within a layer of what has changed."""
    weights = load_file(source / "model.safetensors")
    config = read_model_config(source)
    changed = set()
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        before = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        layer = {name: tensor.clone() for name, tensor in before.items()}
        fold(layer, config)
        changed |= {name for name, tensor in layer.items() if not torch.equal(tensor, before[name])}
        weights |= {prefix + name: tensor for name, tensor in layer.items()}
    target.mkdir()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text((source / "config.json").read_text())
    return changed


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fold_changes_the_weights_and_not_the_logits(family: str, name: str, tmp_path: Path) -> None:
    fold, least_changed = FOLDS[name]
    source = make_random_model(tmp_path / "float", family, **FAMILIES[family])
    changed = folded(source, tmp_path / "folded", fold)
    assert len(changed) >= least_changed
    rows = random_rows()
    expected = logits_of(source, rows)
    assert (logits_of(tmp_path / "folded", rows) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_biases_of_keys_and_values_go_with_their_rows(tmp_path: Path) -> None:
    source = make_random_model(tmp_path / "float", "qwen2")
    assert K + ".bias" in folded(source, tmp_path / "keys", fold_keys)
    assert {V + ".bias", V + ".weight", OUT + ".weight"} == folded(source, tmp_path / "values", fold_values)


def test_a_folded_norm_is_exact_in_the_type_it_is_stored_in() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = torch.randn(64, generator=generator).bfloat16().float()
    norm[3] = 0
    weight = torch.randn(8, 64, generator=generator)
    layer = {INPUT_NORM + ".weight": norm.clone(), Q + ".weight": weight.clone()}
    scale = fold_norm(layer, INPUT_NORM, (Q,), scales(64), torch.bfloat16)
    stored = layer[INPUT_NORM + ".weight"]
    assert torch.equal(stored.bfloat16().float(), stored)
    assert (stored != norm).sum() > 50
    assert scale[3] == 1 and stored[3] == 0
    torch.testing.assert_close(layer[Q + ".weight"] * stored, weight * norm, rtol=1e-6, atol=1e-6)


def test_up_changes_no_other_tensor(tmp_path: Path) -> None:
    source = make_random_model(tmp_path / "float", "llama", mlp_bias=True)
    assert folded(source, tmp_path / "ups", fold_ups) == {UP + ".weight", UP + ".bias", DOWN + ".weight"}
