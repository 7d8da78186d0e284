"""The int8 linear layer's Triton kernels against their references."""

from __future__ import annotations

import pytest
import torch

from kernels import int8_rows
from kernels import w8a8 as kernel
from kernels.int8_rows import Int8Rows, group_sums
from tests.kernels.numbers import DTYPES, assert_near, random_tensor


def operands(m: int, n: int, k: int) -> tuple[Int8Rows, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns x, q_w, scale_w, bias."""
    generator = torch.Generator().manual_seed(m + n + k)
    q_x, q_w = (torch.randint(-128, 128, (rows, k), generator=generator, dtype=torch.int8) for rows in (m, n))
    scale_x, scale_w = (torch.rand(rows, generator=generator) / (75 * k**0.5) + 1e-5 for rows in (m, n))
    return rows(q_x, scale_x), q_w, scale_w * 75, torch.randn(n, generator=generator)


def rows(q: torch.Tensor, scale: torch.Tensor) -> Int8Rows:
    return Int8Rows(q, scale, group_sums(q))


@pytest.mark.parametrize("shape", kernel.CASES)
def test_float32_results_are_the_references_to_the_bit(shape: tuple[int, int, int]) -> None:
    x, q_w, scale_w, bias = operands(*shape)
    for b in (None, bias):
        y = kernel.w8a8(x, q_w, scale_w, b, torch.float32)
        assert torch.equal(y, kernel.reference(x, q_w, scale_w, b, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_output_type(dtype: torch.dtype) -> None:
    given = operands(5, 72, 256)
    assert_near(kernel.w8a8(*given, dtype), kernel.reference(*given, torch.float32))


def test_sums_do_not_overflow_at_the_extremes() -> None:
    q_x, q_w = torch.full((2, 4096), -128, dtype=torch.int8), torch.full((64, 4096), -128, dtype=torch.int8)
    ones = torch.ones(64)
    y = kernel.w8a8(rows(q_x, ones[:2]), q_w, ones, None, torch.float32)
    assert torch.equal(y, torch.full((2, 64), 128.0 * 128 * 4096))


def test_k_beyond_what_int32_holds_is_refused() -> None:
    q = torch.zeros(1, kernel.MAX_K + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="exact"):
        kernel.w8a8(rows(q, torch.ones(1)), q, torch.ones(1))


def test_the_number_of_rows_does_not_change_a_bit() -> None:
    """A row's result stays the same: in four buckets, with other tiles, and with k split or not."""
    n, k = 72, 2048
    x, q_w, scale_w, bias = operands(260, n, k)
    several = kernel.w8a8(x, q_w, scale_w, bias)
    splits = set()
    for m in (1, 16, 40, 100, 260):
        splits.add(kernel._splits(kernel._tiles(90, m), m, n, k))
        assert torch.equal(kernel.w8a8(Int8Rows(*(part[:m] for part in x)), q_w, scale_w, bias), several[:m])
    assert splits == {1, 2, 4}


@pytest.mark.parametrize(
    "m, n, k, splits",
    [(16, 6144, 4096, 2), (16, 28672, 4096, 1), (64, 4096, 14336, 4), (256, 64, 4096, 8), (257, 64, 4096, 1)],
)
def test_k_is_split_where_the_tiles_would_not_fill_the_gpu(m: int, n: int, k: int, splits: int) -> None:
    assert kernel._splits(kernel._tiles(90, m), m, n, k) == splits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", kernel.ROWS_CASES)
def test_activations_are_quantized_row_by_row(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = random_tensor(*shape, dtype=dtype)
    for measured, expected in zip(kernel.quantize(x), int8_rows.reference(x), strict=True):
        assert measured.dtype == expected.dtype and torch.equal(measured, expected)


def test_rows_of_zeros_and_of_almost_zeros_are_zero() -> None:
    x = random_tensor(4, 48)
    x[1], x[2] = 0, 1e-37
    q, scale, sums = kernel.quantize(x)
    assert not q[1:3].any() and not scale[1:3].any() and not sums[1:3].any()
    assert q[0].abs().max() == 127 and torch.equal(sums, q.sum(1, keepdim=True, dtype=torch.int32))


def test_sums_are_of_groups_of_128_columns() -> None:
    q = kernel.quantize(random_tensor(3, 300)).q
    expected = [[sum(row[start : start + 128]) for start in (0, 128, 256)] for row in q.tolist()]
    assert kernel.quantize(random_tensor(3, 300)).sums.tolist() == expected == group_sums(q).tolist()


def test_the_layer_is_near_the_float_one() -> None:
    x, w = random_tensor(6, 512), random_tensor(64, 512, seed=1)
    q_w, scale_w, _ = kernel.quantize(w)
    y, expected = kernel.w8a8(kernel.quantize(x), q_w, scale_w, None, torch.float32), x @ w.T
    assert (y - expected).norm() / expected.norm() < 0.02
