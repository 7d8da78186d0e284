"""The Triton kernels of the SwiGLU gate against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import activation as kernel
from kernels.int8_rows import group_sums
from tests.kernels.numbers import DTYPES, assert_near, random_tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", kernel.CASES)
def test_the_second_half_is_gated_by_the_first(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random_tensor(*shape, dtype=dtype)
    y = kernel.activate(x)
    assert y.dtype == dtype
    assert_near(y, kernel.reference(x.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind, gated", [(kind, gated) for kind in kernel.KINDS for gated in (True, False) if gated or kind != "swiglu_oai"]
)
def test_every_kind_is_that_of_torch(kind: str, gated: bool, dtype: torch.dtype) -> None:
    x = 3 * random_tensor(7, 96, dtype=dtype)
    y = kernel.activate(x, kind, gated)
    assert y.dtype == dtype and y.shape == (7, 48 if gated else 96)
    assert_near(y, kernel.reference(x.float(), kind, gated))
    rows, expected = kernel.activate_int8(x, kind, gated), kernel.reference_int8(x, kind, gated)
    assert_near(rows.scale, expected.scale)
    assert (rows.q.int() - expected.q.int()).abs().max() <= 1  # a tie may fall either way
    assert torch.equal(rows.sums, group_sums(rows.q))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_gelus_of_any_size_do_not_overflow(kind: str) -> None:
    x = torch.tensor([[-3e38, -200.0, -0.0, 200.0, 3e37]])
    assert torch.equal(kernel.activate(x, kind, gated=False), torch.tensor([[0.0, 0.0, 0.0, 200.0, 3e37]]))


def test_gates_of_any_size_do_not_overflow() -> None:
    x = torch.tensor([[-3e38, -200.0, -0.0, 200.0, 1.0, 2.0, 3.0, 4.0]])
    assert torch.equal(kernel.activate(x), torch.tensor([[0.0, 0.0, 0.0, 800.0]]))


def test_rows_that_are_not_contiguous_are_read_as_they_are() -> None:
    x = random_tensor(96, 5).t()
    assert_near(kernel.activate(x), kernel.reference(x))
    assert torch.equal(kernel.activate_int8(x).sums, kernel.activate_int8(x.contiguous()).sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [case for case in kernel.CASES if len(case) == 2])
def test_int8_rows_have_their_scales_and_sums(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = random_tensor(*shape, dtype=dtype)
    x[-1] = 0
    assert_int8_like_the_reference(x)
    assert kernel.activate_int8(x).scale[-1] == 0


@pytest.mark.parametrize("intermediate", [kernel.MAX_ROW_BLOCK, kernel.MAX_ROW_BLOCK + 1, 5 * kernel.LOOP_BLOCK])
def test_long_int8_rows_have_one_scale(intermediate: int) -> None:
    x = random_tensor(3, 2 * intermediate)
    x[0, intermediate - 1], x[0, -1] = 30, 40  # the largest of its row, in the last block
    x[1, 0], x[1, intermediate] = 30, 40  # the largest of its row, in the first block
    assert_int8_like_the_reference(x)


def assert_int8_like_the_reference(x: Tensor) -> None:
    q, scale, sums = kernel.activate_int8(x)
    expected_q, expected_scale, _ = kernel.reference_int8(x)
    assert q.dtype == torch.int8 and q.shape == expected_q.shape
    assert_near(scale, expected_scale)
    assert (q.int() - expected_q.int()).abs().max() <= 1  # a tie may fall either way
    assert (q != expected_q).float().mean() < 0.01
    assert torch.equal(sums, group_sums(q))
