"""Models with recurrent layers on the Triton kernels, against transformers, and engines with the tokens of the torch tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.api.config.schema import SpeculationConfig
from tests.families.conftest import checkpoint  # noqa: F401 (a fixture)
from tests.families.test_transformers import LIMIT, log_probs, oracle
from tests.families.tiny import VOCAB
from tests.kernels.interpreted.test_device_runner import finish, make_core, request
from tests.model.driver import GroupDriver
from tests.model.tiers import TierCase
from tests.native.harness import prompt

TIER = TierCase("torch", 16)
NAMES = ["qwen3.5", "lfm2"]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_decoding_of_two_sequences_have_transformers_logits(
    name: str,
    checkpoint: Callable[..., Path],  # noqa: F811
) -> None:
    directory = checkpoint(name)
    driver = GroupDriver.of(directory, TIER)
    first, second = prompt(23, VOCAB, seed=1), prompt(9, VOCAB, seed=2)
    driver.begin(0, first)
    logits = [driver.step([(0, 14)])[0]]
    driver.begin(2, second)
    mixed = driver.step([(0, 9), (2, 9)])
    generated = driver.generate([0, 2], 2)

    def assert_equal(measured: Tensor, slot: int) -> None:
        expected = oracle(directory).logits(driver.tokens[slot][:-1])
        assert (log_probs(measured) - log_probs(expected)).abs().max() <= LIMIT

    assert_equal(torch.cat((*logits, mixed[0], generated[0])), 0)
    assert_equal(torch.cat((mixed[2], generated[2])), 2)


@pytest.mark.parametrize("mode", ["none", "lookup"])
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_looks_ahead_has_the_torch_tiers_tokens(
    name: str,
    mode: str,
    checkpoint: Callable[..., Path],  # noqa: F811
) -> None:
    requests = [request(9 + 14 * n, 4, n) for n in range(2)]
    expected = finish(make_core(checkpoint(name), "torch"), requests)
    speculation = SpeculationConfig(mode=mode, max_draft_tokens=3)
    core = make_core(checkpoint(name), "triton", speculation=speculation, look_ahead=True, max_chunk_tokens=7)
    measured = finish(core, requests)
    assert [result.output_token_ids for result in measured] == [result.output_token_ids for result in expected]
