"""Every family that transformers runs here agrees with transformers' own forward pass; a token's logits never depend on others.

By default a sample of the families; EVERBATCH_EVERY=1 runs all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import CDLL
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.architectures.hosted import HOSTED
from tests.hosted.harness import hosted_driver
from tests.hosted.tiny import COMMON, save, tiny_model
from tests.model.driver import Driver
from tests.native.harness import Format, prompt, threads
from tests.native.test_invariance import assert_same

# Experts, sinks and windows; latent attention; heads and layers that differ; windows that only masks know; gates of few numbers.
SAMPLE = ("gpt_oss", "qwen3_moe", "deepseek_v3", "gemma4_text", "mimo_v2_flash", "phimoe", "laguna", "gpt2")
KINDS = sorted(set(HOSTED.values())) if "EVERBATCH_EVERY" in os.environ else SAMPLE
FORMATS = [Format("float32"), Format("bfloat16"), Format("bfloat16", "w8a8", kv="int8"), Format("float32", "w4a8")]
LENGTH, NUM_NEW = 45, 6  # tokens: the prompt is longer than every window


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor, list[int]]]:
    """A checkpoint of a model type, transformers' logits for a prompt, and the prompt."""

    @cache
    def make(kind: str) -> tuple[Path, Tensor, list[int]]:
        model = tiny_model(kind)
        tokens = [3 + token for token in prompt(LENGTH, COMMON["vocab_size"] - 3)]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        return save(model, tmp_path_factory.mktemp(kind.replace("-", "_"))), logits, tokens

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(checkpoint: Callable, kernels: CDLL, kind: str) -> None:
    directory, expected, tokens = checkpoint(kind)
    for library in (None, kernels):
        driver = hosted_driver(directory, library, Format())
        driver.begin(0, tokens)
        measured = driver.run(0, [7, 13, LENGTH - 20])
        assert (measured.log_softmax(-1) - expected.log_softmax(-1)).abs().max() <= 1e-4
        assert measured.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_chunks_neighbours_or_evictions(
    checkpoint: Callable, kernels: CDLL, kind: str, form: Format
) -> None:
    directory, _, tokens = checkpoint(kind)
    driver = hosted_driver(directory, kernels, form, num_blocks=64)
    driver.begin(0, tokens)
    of_prompt = driver.run(0, [LENGTH])
    of_output = driver.generate([0], NUM_NEW)[0]
    known = driver.tokens[0]
    driver.begin(1, known[:-1])  # evicted, and computed again in one piece, prompt and output alike
    again = driver.run(1, [len(known) - 1])
    assert_same(again, torch.cat((of_prompt, of_output)))
    with threads(1):
        assert_same(_beside_others(driver, tokens), of_prompt)


def _beside_others(driver: Driver, tokens: list[int]) -> Tensor:
    """The logits of a prompt that runs in chunks, beside a prompt and a sequence that generates."""
    driver.begin(2, tokens[3:20])
    driver.run(2, [17])
    driver.begin(3, tokens[::-1])
    driver.begin(4, tokens)
    parts = []
    for chunk in (1, 9, LENGTH - 10):
        parts.append(driver.step([(2, 1), (4, chunk), (3, 5)])[4])
    return torch.cat(parts)
