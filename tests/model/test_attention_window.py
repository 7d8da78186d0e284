"""`kv_cache.max_attention_window` over models with and without a window of their own, against a masked reference.

The reference is the same weights under a config.json that says the window: transformers masks what lies outside of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.conftest import Oracle
from tests.model.driver import GroupDriver
from tests.model.test_parity import assert_equal, make_driver, prompt
from tests.model.tiers import TierCase


def masked(directory: Path, window: int, to: Path) -> Oracle:
    """transformers' Mistral, which differs from Llama in its window alone, over the weights of `directory`."""
    shutil.copytree(directory, to)
    config = json.loads((to / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    (to / "config.json").write_text(json.dumps(config))
    model, report = AutoModelForCausalLM.from_pretrained(
        to, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert type(model).__name__ == "MistralForCausalLM" and not report["missing_keys"]
    return Oracle(model)


@pytest.mark.feature("001-29")
@pytest.mark.parametrize(
    ("name", "asked", "window"),
    [("llama2", 13, 13), ("llama2", 1, 1), ("llama2", 70, 70), ("mistral", 13, 13), ("mistral", 70, 24)],
)
def test_no_token_attends_to_more_than_the_window_that_was_asked_for(
    checkpoint: Callable[[str], Path], tier: TierCase, tmp_path: Path, name: str, asked: int, window: int
) -> None:
    oracle = masked(checkpoint(name), window, tmp_path / "masked")
    tokens = prompt(5 * tier.block + 90)
    driver = make_driver(checkpoint(name), tier, max_attention_window=asked)
    assert driver.info.sliding_window == window
    driver.begin(0, tokens)
    measured = driver.run(0, [2 * tier.block + 1, 7, len(tokens) - 2 * tier.block - 8])
    assert_equal(measured, oracle.logits(tokens))
    generated = driver.generate([0], 5)[0]
    assert_equal(generated, oracle.logits(driver.tokens[0][:-1])[len(tokens) :])


@pytest.mark.feature("001-29")
def test_without_a_window_every_token_before_is_attended_to(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    """The same prompt, capped and not, so that the window above cannot be without effect."""
    tokens = prompt(5 * tier.block)
    logits = []
    for window in (None, 13):
        driver = GroupDriver.of(checkpoint("llama2"), tier, max_attention_window=window)
        driver.begin(0, tokens)
        logits.append(driver.run(0, [len(tokens)]))
    assert_equal(logits[1][:13], logits[0][:13])
    assert (logits[1][13:] - logits[0][13:]).abs().max() > 0.01
