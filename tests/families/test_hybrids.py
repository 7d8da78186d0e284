"""Hybrids: experts in either form of a checkpoint, tensors that are left out, and what random models are made with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.api.config.schema import LoraSection, ModelConfigSection, SchedulerConfig, SpeculationConfig
from backend.api.errors import ConfigError
from backend.architectures.registry import read_config
from backend.models.loader import load_directory
from backend.quant.run import QuantSettings, check_source
from backend.worker.group import InProcessWorkerGroup
from benchmarks.quality.perplexity import row_logits
from tests.families.published import CONFIGS
from tests.families.test_transformers import LIMIT, log_probs, oracle
from tests.families.tiny import make
from tests.model.driver import make_group
from tests.model.tiers import TierCase
from tools.make_random_model import make_config, random_weights

CPU = torch.device("cpu")
ROWS = torch.randint(1, 131, (2, 40), generator=torch.Generator().manual_seed(0))


def logits(directory: Path) -> Tensor:
    return row_logits(load_directory(directory, None, "float32", CPU), ROWS)


def rewritten(source: Path, directory: Path, weights: dict[str, Tensor]) -> Path:
    directory.mkdir()
    shutil.copy(source / "config.json", directory)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("name", ["qwen3.5 moe", "qwen3.5 moe with images", "qwen3 next"])
def test_experts_may_be_in_one_tensor_or_apart(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """As in files of Qwen3.5, and in those of Qwen3-Next and of transformers."""
    source = checkpoint(name)
    weights = load_file(source / "model.safetensors")
    layers = {each.partition(".mlp.experts.")[0] for each in weights if ".mlp.experts." in each}
    assert len(layers) >= 3
    for layer in layers:
        of = [
            [weights.pop(f"{layer}.mlp.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for expert in range(7)
        ]
        weights[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in of])
        weights[f"{layer}.mlp.experts.down_proj"] = torch.stack([parts[2] for parts in of])
    assert torch.equal(logits(rewritten(source, tmp_path / "stacked", weights)), logits(source))


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 with images", "qwen3 next"])
def test_what_predicts_further_tokens_is_left_out(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint(name)
    more = {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.mlp.down_proj.weight": torch.ones(2, 2)}
    weights = load_file(source / "model.safetensors") | more
    assert torch.equal(logits(rewritten(source, tmp_path / "more", weights)), logits(source))


@pytest.mark.parametrize("family, shape, published", [("qwen3_5", "H", "Qwen3.5-0.8B"), ("lfm2", "F", "LFM2-350M")])
def test_shapes_of_random_models_are_those_of_published_ones(family: str, shape: str, published: str) -> None:
    content = make_config(family, shape, {}).to_dict()
    ours, theirs = read_config(content | dict(architectures=content["architectures"])), read_config(CONFIGS[published])
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        assert getattr(ours, field) == getattr(theirs, field), field
    text = [replace(rope, sections=(), sections_take_turns=False) for rope in theirs.ropes]  # theirs takes images, too
    assert (ours.layers, list(ours.ropes), ours.recurrence) == (theirs.layers, text, theirs.recurrence)
    assert (ours.head_dim, ours.tied_embeddings, ours.block) == (theirs.head_dim, theirs.tied_embeddings, theirs.block)


def test_random_states_neither_vanish_nor_grow() -> None:
    weights = random_weights(make_config("qwen3_5", None, dict(linear_num_value_heads=64)), seed=1)
    rates = weights["model.layers.0.linear_attn.A_log"].exp()
    steps = torch.nn.functional.softplus(weights["model.layers.0.linear_attn.dt_bias"])
    assert 1 <= rates.min() < 3 and 12 < rates.max() <= 16
    assert 0.00099 < steps.min() < 0.002 and 0.05 < steps.max() < 0.101


def group_of(directory: Path, **options: object) -> InProcessWorkerGroup:
    section = ModelConfigSection(path=str(directory), device="cpu", num_threads=1)
    return InProcessWorkerGroup(section, SchedulerConfig(max_batch_size=2), **options)


def test_a_draft_model_with_a_state_is_refused(checkpoint: Callable[..., Path]) -> None:
    """Its state would be that behind wrong guesses, and each step with drafts would fail."""
    speculation = SpeculationConfig(mode="draft_model", draft_model=str(checkpoint("qwen3.5")))
    with pytest.raises(ConfigError, match="has recurrent layers, whose state cannot go back .* give a draft model"):
        group_of(checkpoint("qwen3"), speculation=speculation).load()


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2"])
def test_adapters_are_refused(name: str, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"has no linear layers that adapters can change; use --set lora.enabled=false"
    ):
        group_of(checkpoint(name), lora=LoraSection(enabled=True)).load()


def test_a_quantised_checkpoint_is_not_made_of_one(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"has recurrent layers, .* --set model.quantization=w8a8"):
        check_source(checkpoint("lfm2"), QuantSettings("w8a8"))


def test_a_convolution_too_long_for_the_native_kernels_runs_on_torch_operators(tmp_path: Path) -> None:
    directory = make(tmp_path, "lfm2", conv_L_cache=6)
    info = make_group(directory, TierCase("auto", 32)).load()
    assert (info.kernels, info.remarks[0].count("its convolutions read 6 tokens, more than 4")) == ("torch", 1)
    difference = log_probs(logits(directory)[0]) - log_probs(oracle(directory).logits(ROWS[0].tolist()))
    assert difference.abs().max() < LIMIT
