"""A whole model on the Triton kernels, against transformers: what a GPU would run, in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.model.conftest import Oracle
from tests.native.harness import Format, torch_driver
from tools.make_random_model import make_random_model

LIMIT = 1e-4  # absolute, on logits of magnitude 1 to 10
BLOCK_SIZE = 16


def assert_equal(measured: Tensor, expected: Tensor) -> None:
    assert measured.shape == expected.shape
    assert (measured - expected).abs().max() <= LIMIT


@pytest.mark.parametrize("family, head_dim, window", [("llama3", 32, None), ("mistral", 32, 24), ("qwen3", 16, None)])
def test_chunks_and_decoding_of_two_sequences_have_transformers_logits(
    tmp_path: Path, family: str, head_dim: int, window: int | None
) -> None:
    directory = make_random_model(tmp_path, family, head_dim=head_dim, num_hidden_layers=2)
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    driver = torch_driver(directory, Format(), BLOCK_SIZE, num_blocks=40, window=window)
    first, second = ([(7 * i + seed) % 131 for i in range(length)] for seed, length in ((1, 37), (2, 21)))
    driver.begin(0, first)
    logits = [driver.step([(0, 20)])[0]]
    driver.begin(2, second)
    mixed = driver.step([(0, 17), (2, 21)])
    logits.append(mixed[0])
    assert_equal(torch.cat(logits), oracle.logits(first))
    assert_equal(mixed[2], oracle.logits(second))
    generated = driver.generate([0, 2], 2)
    for slot, prompt in ((0, first), (2, second)):
        assert_equal(generated[slot], oracle.logits(driver.tokens[slot][:-1])[len(prompt) :])
