"""The mixture of experts' Triton kernels against their references."""

from __future__ import annotations

import pytest
import torch

from kernels import moe as kernel
from tests.kernels.numbers import DTYPES, assert_near, random_tensor


def _ids(tokens: int, experts: int, top_k: int, how: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    if how == "one":
        return torch.full((tokens, top_k), experts - 1, dtype=torch.int32)
    among = torch.arange(experts)[:: 3 if how == "few" else 1]
    ids = torch.stack([among[torch.randperm(len(among), generator=generator)[:top_k]] for _ in range(tokens)]).int()
    if how == "absent":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    return ids


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("tokens, experts, top_k", [(1, 8, 2), (5, 4, 4), (70, 60, 6), (3, 128, 8), (9, 3, 1)])
def test_tokens_are_routed(tokens: int, experts: int, top_k: int, renormalise: bool) -> None:
    logits = random_tensor(tokens, experts) * 3
    weights, ids = kernel.route(logits, top_k, renormalise)
    expected_weights, expected_ids = kernel.reference_route(logits, top_k, renormalise)
    assert torch.equal(ids, expected_ids)
    assert_near(weights, expected_weights)


def test_of_equal_experts_the_lower_is_chosen() -> None:
    logits = random_tensor(40, 12).mul(2).round()
    logits[0] = 0
    logits[1, 3:] = -torch.inf
    _, ids = kernel.route(logits, 6, True)
    assert torch.equal(ids, kernel.reference_route(logits, 6, True)[1])
    assert ids[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted(ids[1].tolist()) == [0, 1, 2, 3, 4, 5]


def test_a_token_of_nan_is_routed_to_experts_that_exist() -> None:
    logits = torch.full((2, 5), torch.nan)
    _, ids = kernel.route(logits, 3, True)
    assert ids.min() >= 0 and ids.max() < 5


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("rows, groups", [(1, 1), (1, 8), (40, 3), (333, 20), (2100, 5)])
def test_rows_are_grouped_in_their_order(rows: int, groups: int, block_m: int) -> None:
    ids = torch.randint(-1, groups, (rows,), generator=torch.Generator().manual_seed(rows)).int()
    made, expected = kernel.group_rows(ids, groups, block_m), kernel.reference_groups(ids, groups, block_m)
    assert torch.equal(made.tile_group, expected.tile_group)
    used = int((expected.tile_group >= 0).sum()) * block_m
    assert made.rows.shape == expected.rows.shape
    assert torch.equal(made.rows[:used], expected.rows[:used])


@pytest.mark.parametrize("block_m", kernel.TILES)
def test_there_are_tiles_for_the_worst_grouping(block_m: int) -> None:
    for sizes in ([1] * 9, [block_m + 1] * 3, [2 * block_m, 1, 0, 1], [0, 0]):
        ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).int()
        made = kernel.group_rows(ids, len(sizes), block_m)
        needed = sum(-(-size // block_m) for size in sizes)
        assert (made.tile_group >= 0).sum() == needed <= len(made.tile_group)
        assert len(made.rows) == len(made.tile_group) * block_m


@pytest.mark.parametrize("block_m, dtype", [*((16, dtype) for dtype in DTYPES), (64, torch.float16)])
@pytest.mark.parametrize("tokens, experts, top_k, k, n, how", kernel.CASES)
def test_each_pair_is_multiplied_by_its_expert(
    tokens: int, experts: int, top_k: int, k: int, n: int, how: str, block_m: int, dtype: torch.dtype
) -> None:
    x, w = random_tensor(tokens, k, dtype=dtype), (random_tensor(experts, n, k) / k**0.5).to(dtype)
    ids = _ids(tokens, experts, top_k, how)
    out = kernel.grouped_matmul(x, w, kernel.group_rows(ids, experts, block_m), top_k)
    expected = kernel.reference(x, w, ids.reshape(-1), top_k)
    present = ids.reshape(-1) >= 0
    assert_near(out[present], expected[present])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, experts, top_k, k, n, how", kernel.CASES)
def test_the_choices_of_a_token_are_weighted_and_summed(
    tokens: int, experts: int, top_k: int, k: int, n: int, how: str, dtype: torch.dtype
) -> None:
    x, w = random_tensor(tokens * top_k, k, dtype=dtype), (random_tensor(experts, n, k) / k**0.5).to(dtype)
    ids = _ids(tokens, experts, top_k, how)
    weights = random_tensor(tokens, top_k).softmax(1)
    groups = kernel.group_rows(ids, experts, kernel.block_m_for(ids.numel(), experts))
    expected = kernel.reference_sum(kernel.reference(x, w, ids.reshape(-1), 1), weights)
    assert_near(kernel.grouped_matmul_sum(x, w, groups, weights), expected)


def test_many_rows_of_an_expert_fill_the_largest_tiles() -> None:
    x, w = random_tensor(150, 80), random_tensor(2, 140, 80) / 80**0.5
    ids = torch.zeros(150, 1, dtype=torch.int32)
    out = kernel.grouped_matmul(x, w, kernel.group_rows(ids, 2, 128), 1)
    assert_near(out, kernel.reference(x, w, ids.reshape(-1), 1))
