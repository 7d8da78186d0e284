"""Each family computes what transformers computes: log-probabilities within 1e-4 in float32, and the same greedy tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from backend.architectures.registry import FAMILIES as ARCHITECTURES
from tests.families.tiny import FAMILIES, VOCAB
from tests.images.models import TINY
from tests.model.conftest import Oracle
from tests.model.driver import GroupDriver
from tests.model.tiers import TierCase
from tests.native.harness import prompt

LIMIT = 1e-4  # absolute, on log-probabilities of the natural logarithm
LENGTH, NUM_NEW = 77, 12  # several windows and blocks of each tier


def oracle(directory: Path) -> Oracle:
    [architecture] = json.loads((directory / "config.json").read_text())["architectures"]
    model, report = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    _in_sequence(model)
    return Oracle(model)


def _in_sequence(model: PreTrainedModel) -> None:
    """The gated delta rule of transformers in its form of one token after another.

    The one of whole chunks inverts a matrix, and rounding makes it differ from the other by up to 2e-4, more than LIMIT.
    """
    module = sys.modules[type(model).__module__]
    if hasattr(module, "torch_chunk_gated_delta_rule"):
        module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule


def log_probs(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_agrees_with_transformers(name: str, checkpoint: Callable[..., Path], tier: TierCase) -> None:
    directory = checkpoint(name)
    driver = GroupDriver.of(directory, tier)
    tokens = prompt(LENGTH, VOCAB, seed=len(name))
    driver.begin(0, tokens)
    measured = torch.cat([driver.run(0, [40, LENGTH - 40]), driver.generate([0], NUM_NEW)[0]])
    expected = oracle(directory).logits(driver.tokens[0][:-1])
    difference = (log_probs(measured) - log_probs(expected)).abs().max().item()
    assert difference <= LIMIT, f"log-probabilities differ by {difference:.2e}"  # NaN fails too
    greedy = expected[LENGTH - 1 :].topk(2).values
    is_clear = greedy[:, 0] - greedy[:, 1] >= 2 * LIMIT  # no tie, which rounding decides
    chosen = torch.tensor(driver.tokens[0][LENGTH:])
    assert torch.equal(chosen[is_clear], expected[LENGTH - 1 :].argmax(-1)[is_clear]) and is_clear.sum() > NUM_NEW // 2


def test_every_architecture_has_a_tiny_checkpoint() -> None:
    of_images = {f"{tiny.name}ForConditionalGeneration" for tiny in TINY.values()} | {
        "Idefics3ForConditionalGeneration"
    }
    assert {architecture for _, architecture, _ in FAMILIES.values()} | of_images == set(ARCHITECTURES)
