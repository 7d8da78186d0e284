"""RMSNorm's Triton kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from kernels import rms_norm as kernel
from tests.kernels.numbers import DTYPES, assert_near, random_tensor

EPS = 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", kernel.CASES)
def test_rms_norm(shape, dtype):
    x, weight = random_tensor(*shape, dtype=dtype), random_tensor(shape[-1], dtype=dtype)
    assert_near(kernel.rms_norm(x, weight, EPS), kernel.reference(x.float(), weight.float(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", kernel.CASES)
def test_the_residual_is_added_first_and_the_sum_returned(shape, dtype):
    x, residual, weight = (random_tensor(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[-1:])))
    normed, total = kernel.add_rms_norm(x, residual, weight, EPS)
    assert_near(total, x.float() + residual.float())
    assert_near(normed, kernel.reference(total.float(), weight.float(), EPS))


@pytest.mark.parametrize("shape", [case for case in kernel.CASES if len(case) == 2])
def test_int8_rows_have_their_scales_and_sums(shape):
    x, weight = random_tensor(*shape), random_tensor(shape[-1])
    x[-1] = 0
    q, scale, total = kernel.rms_norm_int8(x, weight, EPS)
    expected_q, expected_scale, _ = kernel.reference_int8(x, weight, EPS)
    assert_near(scale, expected_scale)
    assert (q.int() - expected_q.int()).abs().max() <= 1  # a tie may fall either way
    assert (q != expected_q).float().mean() < 0.01
    assert torch.equal(total, q.sum(1, dtype=torch.int32))
    assert scale[-1] == 0 and not q[-1].any()


def test_an_int8_row_too_small_for_its_scale_is_zero():
    x, weight = random_tensor(3, 64), random_tensor(64) * 1e-37
    for part in kernel.rms_norm_int8(x, weight, EPS):
        assert not part.any()
