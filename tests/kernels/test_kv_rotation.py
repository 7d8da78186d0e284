"""The rotation of queries and of keys that are quantised, and the shift of keys that have a bias."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import rope
from kernels.common import kv_rotation
from kernels.common.kv_format import dequantize_rows, quantize_rows
from kernels.common.kv_rotation import mean_of_rotated, rotate, rotated_key, rotated_query
from tests.kernels.numbers import random_tensor

HEAD_DIMS = [2, 6, 8, 20, 64, 80, 96, 128, 256, 1, 7]


def matrix(head_dim: int) -> Tensor:
    """The rotation's, as products of signs: Sylvester's within blocks of a half, and of the two halves."""
    half = head_dim // 2
    block = half & -half
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)])
    within = torch.block_diag(*[signs] * (half // block))
    return torch.cat((torch.cat((within, within), 1), torch.cat((within, -within), 1)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_head_is_multiplied_with_hadamard_s_matrix_of_its_blocks(head_dim: int) -> None:
    x = torch.randint(-99, 99, (3, 2, head_dim), generator=torch.Generator().manual_seed(head_dim)).float()
    expected = x if head_dim % 2 else x @ matrix(head_dim).T
    assert torch.equal(rotate(x, 1.0), expected)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_products_of_queries_and_keys_stay_as_they_are_and_keys_do_not_grow(head_dim: int) -> None:
    q, k = random_tensor(5, 3, head_dim), random_tensor(5, 3, head_dim, seed=1)
    found = (rotated_query(q).double() * rotated_key(k).double()).sum(2)
    torch.testing.assert_close(found, (q.double() * k.double()).sum(2), rtol=1e-5, atol=1e-5)
    assert (rotated_key(k).norm(dim=2) <= k.norm(dim=2) * (1 + 1e-6)).all()


def test_a_shift_changes_all_scores_of_a_query_by_the_same_number() -> None:
    q, k, shift = random_tensor(1, 2, 64), random_tensor(9, 2, 64, seed=1), 3 * random_tensor(2, 64, seed=2)
    change = (rotated_query(q) * (rotated_key(k, shift) - rotated_key(k))).sum(2)
    torch.testing.assert_close(change, change[:1].expand(9, 2), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(change[0], -(q * shift).sum(2)[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 10])
def test_the_shift_is_the_mean_of_what_the_positions_make_of_a_bias(rotary_dim: int, interleaved: bool) -> None:
    bias = 5 * random_tensor(3, 16)
    frequencies = 1e4 ** (-torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    frequencies[-1] = 0  # never turns
    angles = torch.outer(torch.arange(kv_rotation.SHIFT_POSITIONS).double(), frequencies.double())
    factors = rope.rope_factors(angles.cos() * 1.5, angles.sin() * 1.5, interleaved)
    expected = rope.reference(bias.double().expand(len(angles), -1, -1), *factors, interleaved).mean(0)
    found = mean_of_rotated(bias, frequencies, 1.5, interleaved)
    assert found.dtype == torch.float32 and found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_few_large_dimensions_cost_the_others_less() -> None:
    keys = random_tensor(50, 64)
    keys[:, [5, 37]] *= 100

    def error(keys: Tensor) -> float:
        q = quantize_rows(keys, 8)
        return (dequantize_rows(*q) - keys).norm().item() / math.sqrt(keys.numel())

    assert error(rotated_key(keys)) < error(keys) / 2
