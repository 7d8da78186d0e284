"""A whole model on the Triton kernels, against transformers: what a GPU would run, in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.model.test_attention_window import MaskedOracle
from tests.native.harness import Attention, Format, torch_driver
from tools.make_random_model import make_random_model

LIMIT = 1e-4  # absolute, on logits of magnitude 1 to 10
BLOCK_SIZE = 16


def assert_equal(measured: Tensor, expected: Tensor) -> None:
    assert measured.shape == expected.shape
    assert (measured - expected).abs().max() <= LIMIT


@pytest.mark.parametrize(
    "family, head_dim, windows, sink_tokens",
    [
        ("llama3", 32, [None], 0),
        ("mistral", 32, [24], 0),
        ("qwen3", 16, [None], 0),
        ("qwen3_moe", 16, [None], 0),
        ("mistral", 32, [24, 10], 3),  # in decode_attention.py
        ("mistral", 16, [24, 10], 3),  # in context_attention.py
    ],
)
def test_chunks_and_decoding_of_two_sequences_have_transformers_logits(
    tmp_path: Path, family: str, head_dim: int, windows: list[int | None], sink_tokens: int
) -> None:
    directory = make_random_model(tmp_path, family, head_dim=head_dim, num_hidden_layers=len(windows))
    oracle = MaskedOracle(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), windows, sink_tokens)
    attention = Attention(None if None in windows else tuple(windows), sink_tokens)
    driver = torch_driver(
        directory, Format(), BLOCK_SIZE, attention, num_blocks=40, window=None if None in windows else max(windows)
    )
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
