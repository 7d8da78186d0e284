"""LoRA's Triton kernels against their references."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kernels import lora as kernel
from tests.kernels.numbers import DTYPES, assert_near, random_tensor


class Problem:
    def __init__(
        self,
        tokens: int,
        ranks: tuple[int, ...],
        max_rank: int,
        k: int,
        widths: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.offsets = (0, *accumulate(widths))
        self.x = random_tensor(tokens, k, dtype=dtype)
        self.y = random_tensor(tokens, self.offsets[-1], dtype=dtype)
        self.a = (random_tensor(len(widths), len(ranks), max_rank, k) / k**0.5).to(dtype)
        self.b = (random_tensor(len(ranks), self.offsets[-1], max_rank) / max_rank**0.5).to(dtype)
        for adapter, rank in enumerate(ranks):  # what is past a rank must not be used
            self.a[:, adapter, rank:] = torch.nan
            self.b[adapter, :, rank:] = torch.nan
        self.ranks = torch.tensor(ranks, dtype=torch.int32)
        self.scales = random_tensor(len(ranks)).abs() + 0.5
        generator = torch.Generator().manual_seed(tokens)
        self.adapters = torch.randint(-1, len(ranks), (tokens,), generator=generator).int()
        self.adapters[0] = 0

    def run(self) -> Tensor:
        groups = kernel.group_tokens(self.adapters, len(self.ranks))
        y = self.y.clone()
        kernel.lora(y, self.x, self.a, self.b, self.ranks, self.scales, self.offsets, groups)
        return y

    def expected(self) -> Tensor:
        h = kernel.reference_shrink(self.x, self.a, self.ranks, self.adapters)
        return kernel.reference_expand(self.y, h, self.b, self.ranks, self.scales, self.offsets, self.adapters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", kernel.CASES)
def test_each_token_has_its_adapter(
    case: tuple[int, tuple[int, ...], int, int, tuple[int, ...]], dtype: torch.dtype
) -> None:
    problem = Problem(*case, dtype=dtype)
    assert_near(problem.run(), problem.expected())


@pytest.mark.parametrize("case", kernel.CASES)
def test_shrink_in_parts(case: tuple[int, tuple[int, ...], int, int, tuple[int, ...]]) -> None:
    problem = Problem(*case)
    h = kernel.shrink(problem.x, problem.a, problem.ranks, kernel.group_tokens(problem.adapters, len(problem.ranks)))
    expected = kernel.reference_shrink(problem.x, problem.a, problem.ranks, problem.adapters)
    assert len(h) == max(1, case[3] // kernel.SPLIT_K)
    computed = (problem.adapters >= 0) & (problem.ranks[problem.adapters] > 0)
    assert_near(h.sum(0)[:, computed], expected[0][:, computed])


def test_many_tokens_are_computed_in_larger_tiles() -> None:
    problem = Problem(kernel.FEW_TOKENS + 45, (16, 4, 9), 16, 80, (24, 40), dtype=torch.bfloat16)
    assert_near(problem.run(), problem.expected())


def test_tokens_without_an_adapter_keep_their_bits() -> None:
    problem = Problem(*kernel.CASES[2], dtype=torch.bfloat16)
    empty = (problem.adapters < 0) | (problem.ranks[problem.adapters] == 0)
    assert 2 < empty.sum() < len(empty)
    y = problem.y.view(torch.int16)
    y[empty] = torch.arange(y[empty].numel()).view_as(y[empty]).mul(97).to(torch.int16)  # NaN and -0 among them
    assert torch.equal(problem.run().view(torch.int16)[empty], y[empty])


def test_a_batch_without_adapters_stays_as_it_is() -> None:
    problem = Problem(*kernel.CASES[1])
    problem.adapters.fill_(-1)
    assert torch.equal(problem.run(), problem.y)


def test_y_has_to_be_contiguous() -> None:
    problem = Problem(*kernel.CASES[1])
    groups = kernel.group_tokens(problem.adapters, len(problem.ranks))
    y = problem.y.T.contiguous().T
    with pytest.raises(ValueError, match="contiguous"):
        kernel.lora(y, problem.x, problem.a, problem.b, problem.ranks, problem.scales, problem.offsets, groups)
