"""Checkpoints of the layers alone, as embedding models are stored: tensor names without `model.`, and maybe no output head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.api import AdditionalOutput, ConfigError, ErrorCode, OutputConfig
from tests.model.gathering import Engine, engine_config
from tests.model.tiers import TierCase

PROMPT = [(5 * i) % 120 for i in range(21)]
HIDDEN = OutputConfig(prompt_hidden_states="all")
NO_HEAD = "this checkpoint has no output head and generates nothing; ask for embeddings (/v1/embeddings)"
Checkpoint = Callable[[str], Path]


def bare(
    source: Path, directory: Path, tied: bool, change: Callable[[dict[str, Tensor]], object] = lambda _: None
) -> Path:
    """A copy without the head, and without the prefix of all other names."""
    shutil.copytree(source, directory)
    weights = load_file(source / "model.safetensors")
    weights = {name.removeprefix("model."): each for name, each in weights.items() if not name.startswith("lm_head")}
    change(weights)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    change_config(directory, tie_word_embeddings=tied)
    return directory


def change_config(directory: Path, **keys: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **keys}))


def test_their_hidden_states_are_those_of_the_whole_checkpoint(
    checkpoint: Checkpoint, tier: TierCase, tmp_path: Path
) -> None:
    whole = Engine(engine_config(checkpoint("qwen3"), tier)).answer(PROMPT, 0, HIDDEN).result
    engine = Engine(engine_config(bare(checkpoint("qwen3"), tmp_path / "bare", tied=False), tier))
    assert engine.answer(PROMPT, 0, HIDDEN).result.prompt_hidden_states == whole.prompt_hidden_states


@pytest.mark.parametrize(
    ("max_tokens", "output"),
    [
        (1, OutputConfig()),
        (0, OutputConfig(prompt_logits_of=(3,))),
        (0, OutputConfig(prompt_log_probs=0)),
        (0, OutputConfig(return_context_logits=True)),
        (0, OutputConfig(additional_outputs=(AdditionalOutput("logits", True),))),
    ],
)
def test_nothing_is_told_of_a_head_that_is_not_there(
    checkpoint: Checkpoint, tier: TierCase, tmp_path: Path, max_tokens: int, output: OutputConfig
) -> None:
    model = {"additional_outputs": ("logits",)}
    engine = Engine(engine_config(bare(checkpoint("qwen3"), tmp_path / "bare", tied=False), tier, model=model))
    (error,) = engine.responses[engine.ask(PROMPT, max_tokens, output)]
    assert (error.error_code, error.error_msg) == (ErrorCode.UNSUPPORTED, NO_HEAD)


def test_an_architecture_without_a_head_makes_hidden_states_only(
    checkpoint: Checkpoint, tier: TierCase, tmp_path: Path
) -> None:
    """Its embedding may be tied to a head that it had before it was trained for embeddings."""
    whole = Engine(engine_config(checkpoint("qwen3"), tier)).answer(PROMPT, 0, HIDDEN).result
    directory = bare(checkpoint("qwen3"), tmp_path / "bare", tied=True)
    change_config(directory, architectures=["Qwen3Model"])
    engine = Engine(engine_config(directory, tier))
    assert engine.answer(PROMPT, 0, HIDDEN).result.prompt_hidden_states == whole.prompt_hidden_states
    (error,) = engine.responses[engine.ask(PROMPT, 1, OutputConfig())]
    assert (error.error_code, error.error_msg) == (ErrorCode.UNSUPPORTED, NO_HEAD)


def test_a_decoder_that_sees_what_is_behind_is_refused(checkpoint: Checkpoint, tier: TierCase, tmp_path: Path) -> None:
    directory = bare(checkpoint("qwen3"), tmp_path / "bare", tied=True)
    change_config(directory, is_causal=False)
    with pytest.raises(ConfigError, match="is_causal false is not supported here"):
        Engine(engine_config(directory, tier))


def test_one_whose_head_is_the_embedding_generates(checkpoint: Checkpoint, tier: TierCase, tmp_path: Path) -> None:
    engine = Engine(engine_config(bare(checkpoint("qwen3"), tmp_path / "bare", tied=True), tier))
    request_id = engine.ask(PROMPT, 3, OutputConfig())
    engine.run()
    assert len(engine.tokens(request_id, PROMPT)) == 3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda weights: weights.pop("norm.weight"), "the checkpoint lacks the tensor model.norm.weight"),
        (lambda weights: weights.update({"model.norm.weight": weights["norm.weight"].clone()}), "layers"),
        (lambda weights: weights.update({"odd": weights["norm.weight"].clone()}), "odd"),
    ],
)
def test_a_name_too_few_or_too_many_is_an_error_as_ever(
    checkpoint: Checkpoint,
    tier: TierCase,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], object],
    sentence: str,
) -> None:
    directory = bare(checkpoint("qwen3"), tmp_path / "bare", True, change)
    with pytest.raises(ConfigError, match=sentence):
        Engine(engine_config(directory, tier))
