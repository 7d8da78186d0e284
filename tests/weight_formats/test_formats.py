"""int8 with group scales: the reference functions against their formula, written as loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.common.quantize import (
    CASES,
    ELEMENTS_AT_ONCE,
    dequantize,
    quantize_activations,
    quantize_weight,
    row_slices,
)


def random_values(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).to(dtype)


def least_bfloat16_from(x: Tensor) -> Tensor:
    nearest = x.bfloat16()
    return (
        nearest if nearest >= x else torch.nextafter(nearest, torch.tensor(torch.inf, dtype=torch.bfloat16))
    ).float()


def naive(x: Tensor, group: int, is_weight: bool) -> tuple[list[list[int]], list[list[float]]]:
    q, scales = [], []
    for row in x.float():
        row_q, row_scales = [], []
        for values in row.split(group):
            scale = values.abs().max() / 127
            scale = least_bfloat16_from(scale) if is_weight else scale
            row_scales.append(scale.item())
            row_q += [max(-127, min(127, round((value / scale).item()))) if scale > 0 else 0 for value in values]
        q.append(row_q)
        scales.append(row_scales)
    return q, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantize", [quantize_weight, quantize_activations])
@pytest.mark.parametrize("rows, columns, group", CASES)
def test_quantising_follows_its_formula(
    rows: int, columns: int, group: int, quantize: Callable[[Tensor, int], tuple[Tensor, Tensor]], dtype: torch.dtype
) -> None:
    x = random_values(rows, columns, dtype)
    q, scale = quantize(x, group)
    assert (q.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert (q.shape, scale.shape) == (x.shape, (rows, -(-columns // group)))
    assert q.is_contiguous()
    assert (q.tolist(), scale.tolist()) == naive(x, group, quantize is quantize_weight)


@pytest.mark.parametrize("rows, columns, group", CASES)
def test_dequantising_multiplies_each_value_by_the_scale_of_its_group(rows: int, columns: int, group: int) -> None:
    x = random_values(rows, columns)
    q, scale = quantize_weight(x, group)
    restored = dequantize(q, scale, group)
    assert restored.shape == x.shape
    for row in range(rows):
        for column in range(columns):
            step = scale[row, column // group]
            assert restored[row, column] == q[row, column] * step
            assert abs(restored[row, column] - x[row, column]) <= 0.5001 * step


def test_the_largest_value_of_a_group_of_activations_becomes_127() -> None:
    q, _ = quantize_activations(torch.tensor([[0.0, -3.0, 1.5, 0.1, 0.1, 0.05]]), 3)
    assert q.tolist() == [[0, -127, 64, 127, 127, 64]]  # 63.5 goes to the even 64


def test_the_scales_of_a_weight_are_bfloat16_and_large_enough() -> None:
    w = random_values(40, 256)
    _, scale = quantize_weight(w, 32)
    assert torch.equal(scale.bfloat16().float(), scale)
    assert (scale * 127 >= w.view(40, 8, 32).abs().amax(2)).all()


def test_a_group_of_zeros_has_scale_zero_and_stays_zero() -> None:
    q, scale = quantize_activations(torch.tensor([[0.0, 0.0, 5.0, -5.0]]), 2)
    assert (q.tolist(), scale[0, 0].item()) == ([[0, 0, 127, -127]], 0.0)
    assert dequantize(q, scale, 2)[0, :2].tolist() == [0.0, 0.0]


def test_values_too_small_for_a_scale_become_zero() -> None:
    q, scale = quantize_weight(torch.full((1, 4), 1e-45), 4)
    assert (q.tolist(), scale.tolist()) == ([[0, 0, 0, 0]], [[0.0]])


def test_a_large_weight_is_quantised_in_slices_as_if_at_once() -> None:
    w = random_values(2 * ELEMENTS_AT_ONCE // 1000, 1000)
    assert len(row_slices(*w.shape)) > 1
    halves = [quantize_weight(half, 64) for half in w.split(w.shape[0] // 2)]
    for whole, part in zip(quantize_weight(w, 64), (torch.cat(parts) for parts in zip(*halves))):
        assert torch.equal(part, whole)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (ELEMENTS_AT_ONCE, 1), (2, 3 * ELEMENTS_AT_ONCE), (1025, 4096)])
def test_slices_of_rows_cover_every_row_once(shape: tuple[int, int]) -> None:
    assert [row for rows in row_slices(*shape) for row in range(shape[0])[rows]] == list(range(shape[0]))


def test_stacking_quantised_rows_equals_quantising_the_stack() -> None:
    parts = [random_values(rows, 100) for rows in (4, 2, 2)]
    stacked = [torch.cat(tensors) for tensors in zip(*(quantize_weight(part, 64) for part in parts))]
    for measured, expected in zip(stacked, quantize_weight(torch.cat(parts), 64)):
        assert torch.equal(measured, expected)
