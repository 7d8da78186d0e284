"""RMSNorm's Triton kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from kernels import norm as kernel
from kernels.int8_rows import Int8Rows, group_sums
from tests.kernels.numbers import DTYPES, assert_near, random_tensor

EPS = 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", kernel.CASES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random_tensor(*shape, dtype=dtype), random_tensor(shape[-1], dtype=dtype)
    assert_near(kernel.norm(x, weight, EPS), kernel.reference(x.float(), weight.float(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", kernel.CASES)
def test_the_residual_is_added_first_and_the_sum_returned(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = (random_tensor(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[-1:])))
    normed, total = kernel.add_norm(x, residual, weight, EPS)
    assert_near(total, x.float() + residual.float())
    assert_near(normed, kernel.reference(total.float(), weight.float(), EPS))


@pytest.mark.parametrize("shape", [case for case in kernel.CASES if len(case) == 2])
def test_int8_rows_have_their_scales_and_sums(shape: tuple[int, int]) -> None:
    x, weight = random_tensor(*shape), random_tensor(shape[-1])
    x[-1] = 0
    rows = kernel.norm_int8(x, weight, EPS)
    assert_rows_near(rows, kernel.reference_int8(x, weight, EPS))
    assert rows.scale[-1] == 0 and not rows.q[-1].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rows_are_those_of_the_sum_with_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (random_tensor(*s, dtype=dtype, seed=i) for i, s in enumerate(((5, 200), (5, 200), (200,))))
    rows, total = kernel.add_norm_int8(x, residual, weight, EPS)
    assert torch.equal(total, kernel.add_norm(x, residual, weight, EPS)[1])
    assert_rows_near(rows, kernel.reference_int8(total, weight, EPS))


def test_without_triton_int8_rows_are_those_of_the_sum_with_the_residual_too(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, weight = random_tensor(5, 200), random_tensor(5, 200, seed=1), random_tensor(200)
    expected, total = kernel.add_norm_int8(x, residual, weight, EPS)
    monkeypatch.setattr(kernel, "runs_on", lambda x: False)
    rows, same_total = kernel.add_norm_int8(x, residual, weight, EPS)
    assert_rows_near(rows, expected)
    assert torch.equal(total, same_total)


def test_an_int8_row_too_small_for_its_scale_is_zero() -> None:
    x, weight = random_tensor(3, 64), random_tensor(64) * 1e-37
    for part in kernel.norm_int8(x, weight, EPS):
        assert not part.any()


def assert_rows_near(rows: Int8Rows, expected: Int8Rows) -> None:
    assert_near(rows.scale, expected.scale)
    assert (rows.q.int() - expected.q.int()).abs().max() <= 1  # a tie may fall either way
    assert (rows.q != expected.q).float().mean() < 0.01
    assert torch.equal(rows.sums, group_sums(rows.q))
