"""Float32 logits equal transformers' within 1e-4, however tokens come into the batch and wherever their KV lies.

Lengths are told in blocks of the tier, so that borders, partial blocks, copies and windows meet on both tiers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.conftest import Oracle
from tests.model.driver import GroupDriver
from tests.model.tiers import NATIVE, TORCH, TierCase

LIMIT = 1e-4  # absolute, on logits of magnitude 1 to 10
VOCAB = 131
# What a prompt of 5 blocks and a token is cut into, for blocks of b tokens.
CHUNKINGS = {
    "one by one": lambda b: [1] * (5 * b + 1),
    "within a block": lambda b: [b + b // 2 + 1, 3 * b + b // 2],
    "all but one": lambda b: [5 * b, 1],
    "one and the rest": lambda b: [1, 5 * b],
    "block by block": lambda b: [b, b, b, b, b + 1],
    "ragged": lambda b: [b // 2 - 1, 2 * b + 1, 1, 1, 5 * b + 1 - (b // 2 + 2 * b + 2)],
}


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def assert_equal(measured: Tensor, expected: Tensor) -> None:
    assert measured.shape == expected.shape
    difference = (measured - expected).abs().max().item()
    assert difference <= LIMIT, f"logits differ by {difference:.2e}"  # NaN fails too


def make_driver(directory: Path, tier: TierCase, **options: Any) -> GroupDriver:
    driver = GroupDriver.of(directory, tier, **options)
    assert driver.info.kernels == tier.kernels
    driver.window = driver.info.sliding_window
    return driver


@pytest.mark.feature("004-26", "001-29")
def test_every_logit_of_a_whole_prompt_equals_transformers(family: tuple[Path, Oracle], tier: TierCase) -> None:
    directory, oracle = family
    tokens = prompt(15 * tier.block + 1)
    driver = make_driver(directory, tier)
    driver.begin(0, tokens)
    assert oracle.logits(tokens).abs().max() > 1, "logits near zero would prove nothing"
    assert_equal(driver.run(0, [len(tokens)]), oracle.logits(tokens))


@pytest.mark.feature("004-19", "004-26", "001-29")
@pytest.mark.parametrize("cut", CHUNKINGS.values(), ids=CHUNKINGS)
def test_a_prompt_in_chunks_has_the_logits_of_the_whole(
    family: tuple[Path, Oracle], tier: TierCase, cut: Callable[[int], list[int]]
) -> None:
    directory, oracle = family
    block = 8 if tier is TORCH else tier.block
    tokens = prompt(5 * block + 1, seed=1)
    driver = make_driver(directory, tier, block_size=block)
    driver.begin(0, tokens)
    assert_equal(driver.run(0, cut(block)), oracle.logits(tokens))


@pytest.mark.feature("004-19")
@pytest.mark.parametrize("num_new", range(1, 10))
def test_new_tokens_over_a_history_see_the_right_part_of_it(
    family: tuple[Path, Oracle], tier: TierCase, num_new: int
) -> None:
    directory, oracle = family
    history = 8 * tier.block - 4
    tokens = prompt(history + num_new, seed=num_new)
    driver = make_driver(directory, tier)
    driver.begin(0, tokens)
    assert_equal(driver.run(0, [history, num_new])[history:], oracle.logits(tokens)[history:])


@pytest.mark.feature("003-53", "004-26")
@pytest.mark.parametrize("blocks", [1, 3, 3.75, 5.5])
def test_a_prompt_whose_head_was_found_in_the_cache_has_the_same_logits(
    family: tuple[Path, Oracle], tier: TierCase, blocks: float
) -> None:
    """Whole blocks are shared; a block of which only the head is right is copied first, and the copy is written to."""
    directory, oracle = family
    driver = GroupDriver.of(directory, tier)
    num_found, whole = int(blocks * tier.block), int(blocks)
    first = prompt(6 * tier.block - 1)
    second = first[:num_found] + prompt(5 * tier.block, seed=2)
    driver.begin(0, first)
    driver.run(0, [len(first)])
    table = driver.tables[0][:whole]
    if num_found % tier.block:
        table.append(driver.copy(driver.tables[0][whole]))
    driver.begin(1, second, computed=num_found, table=table)
    assert_equal(driver.run(1, [len(second) - num_found]), oracle.logits(second)[num_found:])
    continued = driver.generate([0], 3)[0]  # the source of the copy is as it was
    assert_equal(continued, oracle.logits(driver.tokens[0][:-1])[len(first) :])


@pytest.mark.feature("004-20")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_the_blocks_lie_and_in_which_slot_makes_no_difference(
    family: tuple[Path, Oracle], tier: TierCase, seed: int
) -> None:
    directory, oracle = family
    block = (tier.block // 4, tier.block // 2, tier.block * 4)[seed - 1] if tier is TORCH else tier.block << (seed % 2)
    tokens = prompt(11 * tier.block + 1, seed=seed)
    slot = seed * 2
    driver = make_driver(directory, tier, seed=seed, block_size=block)
    driver.begin(slot, tokens)
    table_is_shuffled = driver.free[-8:] != sorted(driver.free[-8:], reverse=True)
    assert table_is_shuffled
    assert_equal(driver.run(slot, [5 * tier.block, 6 * tier.block + 1]), oracle.logits(tokens))


@pytest.mark.feature("004-06", "004-20", "003-57")
def test_seven_mixed_rows_equal_each_alone(family: tuple[Path, Oracle], tier: TierCase) -> None:
    """Generation rows of many lengths, chunks over histories and fresh prompts in one flat batch, in any order."""
    directory, oracle = family
    driver = make_driver(directory, tier)
    b = tier.block
    prompts = [prompt(length, seed=length) for length in (b + 1, 8 * b + 1, 15 * b + 2, 3 * b, 10 * b, 1, 6 * b + 1)]
    for slot in (0, 1, 2):
        driver.begin(slot, prompts[slot])
        driver.run(slot, [len(prompts[slot])])
    for slot in (3, 4):
        driver.begin(slot, prompts[slot])
        driver.run(slot, [2 * b - 1])
    for slot in (5, 6):
        driver.begin(slot, prompts[slot])
    order = [(4, 5 * b), (0, 1), (6, 6 * b + 1), (2, 1), (5, 1), (3, b + 1), (1, 1)]
    before = dict(driver.computed)
    logits = driver.step(order)
    for slot, num_tokens in order:
        expected = oracle.logits(driver.tokens[slot][: before[slot] + num_tokens])[before[slot] :]
        assert_equal(logits[slot], expected)


@pytest.mark.feature("004-26")
def test_sixty_four_greedy_tokens_equal_transformers(family: tuple[Path, Oracle], tier: TierCase) -> None:
    directory, oracle = family
    driver = make_driver(directory, tier)
    lengths = [(2 * tier.block + 1) + slot * (tier.block + tier.block // 2 + 1) for slot in range(3)]
    for slot, length in enumerate(lengths):
        driver.begin(slot, prompt(length, seed=slot))
        driver.run(slot, [length])
    driver.generate([0, 1, 2], 63)
    near_ties = 0
    for slot, first in enumerate(lengths):
        expected = oracle.logits(driver.tokens[slot])[first - 1 : -1]
        assert len(expected) == 64
        chosen = torch.tensor(driver.tokens[slot][first:])
        best = expected.topk(2).values
        wrong = expected.argmax(-1) != chosen
        assert not (wrong & (best[:, 0] - best[:, 1] >= LIMIT)).any()
        near_ties += int(wrong.sum())
    assert near_ties <= 1, "near ties are rare: one in 192 tokens may be excused"


@pytest.mark.parametrize(
    "tier, dtype, limit",
    [(TORCH, "bfloat16", 0.15), (TORCH, "float16", 0.02), (NATIVE, "bfloat16", 0.15)],
    ids=["torch-bfloat16", "torch-float16", "native-bfloat16"],
    indirect=["tier"],
)
def test_half_precision_stays_near_float32(
    family: tuple[Path, Oracle], tier: TierCase, dtype: str, limit: float
) -> None:
    """The mean error over all logits, relative to their spread. The native kernels have no float16."""
    directory, oracle = family
    tokens = prompt(10 * tier.block)
    driver = GroupDriver.of(directory, tier, dtype=dtype)
    assert driver.info.dtype == dtype
    driver.begin(0, tokens)
    measured = driver.run(0, [6 * tier.block + 1, 4 * tier.block - 1])
    expected = oracle.logits(tokens)
    error = (measured - expected).abs().mean() / expected.std()
    assert error < limit
