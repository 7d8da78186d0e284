"""The Triton kernel of experts' products against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import grouped_linear as kernel
from tests.kernels.numbers import DTYPES, assert_near, random_tensor


def chosen_of(tokens: int, places: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.stack([torch.randperm(experts, generator=generator)[:places] for _ in range(tokens)])


def weights_of(experts: int, n: int, k: int, dtype: torch.dtype, has_bias: bool = False) -> kernel.Weights:
    tensors = random_tensor(experts, n, k, dtype=dtype).unbind()
    biases = random_tensor(experts, n, dtype=dtype).unbind() if has_bias else ()
    return kernel.weights_of(tensors, biases)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens, places, experts, n, k", kernel.CASES)
def test_each_row_is_multiplied_with_its_own_expert(
    tokens: int, places: int, experts: int, n: int, k: int, has_bias: bool, dtype: torch.dtype
) -> None:
    chosen, weights = chosen_of(tokens, places, experts), weights_of(experts, n, k, dtype, has_bias)
    x, plan = random_tensor(tokens, k, dtype=dtype), kernel.plan(chosen, experts)
    gathered = kernel.grouped_linear(x, weights, plan, gathers=True)
    pairs = chosen.flatten()
    for row, pair in enumerate(plan.order.tolist()):
        y = weights.tensors[pairs[pair]].float() @ x[pair // places].float()
        expected = y + weights.biases[pairs[pair]].float() if has_bias else y
        assert_near(gathered[row], expected)
    rows = random_tensor(tokens * places, k, dtype=dtype)
    plain = kernel.grouped_linear(rows, weights, plan, gathers=False)
    assert_near(plain, kernel.reference(rows, weights, plan, False).float())


@pytest.mark.parametrize("block_rows", ["few", "many"])
def test_blocks_cover_each_row_once(block_rows: str) -> None:
    experts, tokens = (7, 40) if block_rows == "few" else (3, 400)
    chosen = chosen_of(tokens, 2, experts)
    chosen[: tokens // 2] = 0  # an expert with most of the rows, and others with few or none
    plan = kernel.plan(chosen, experts)
    assert plan.block == (kernel.FEW_ROWS if block_rows == "few" else kernel.MANY_ROWS)
    covered: list[int] = []
    for expert, row in zip(plan.expert.tolist(), plan.row.tolist(), strict=True):
        if expert >= 0:
            covered += range(row, min(row + plan.block, int(plan.first[expert + 1])))
            assert plan.first[expert] <= row < plan.first[expert + 1]
    assert covered == list(range(2 * tokens))
    assert chosen.flatten()[plan.order].tolist() == sorted(chosen.flatten().tolist())
