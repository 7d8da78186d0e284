"""Rounding against slow forms: GPTQ as its definition says, clipping one group at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.quant.grids import CLIP_RATIOS, DAMPING, Grid, clipped, compensated, nearest, values
from backend.quant.schemes import W4A8, W4A16


def correlated_inputs(tokens: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(k)
    mix = torch.randn(k, k, generator=generator)
    return torch.randn(tokens, k, generator=generator) @ mix * torch.linspace(0.1, 3, k)


def random_weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))


def grid_of(weight: Tensor, group: int = 32) -> Grid:
    scheme = W4A16(group, True, torch.float32)
    return scheme.grid(weight, torch.ones(len(weight), scheme.groups(weight.shape[1])))


def slow_compensated(weight: Tensor, grid: Grid, hessian: Tensor) -> Tensor:
    """Optimal brain surgeon, one column after another: the remaining inverse is formed anew each time."""
    k, group = weight.shape[1], weight.shape[1] // grid.step.shape[1]
    h = hessian.double() + DAMPING * hessian.diagonal().double().mean() * torch.eye(k, dtype=torch.float64)
    w, q = weight.double().clone(), torch.zeros(weight.shape, dtype=torch.float64)
    left = h.diagonal().argsort(descending=True, stable=True).tolist()
    while left:
        inverse = torch.linalg.inv(h[left][:, left])
        i = left[0]
        step, zero, least, most = (part[:, i // group].double() for part in grid[:4])
        q[:, i] = ((w[:, i] / step).round() + zero).clamp(least, most)
        error = (w[:, i] - (q[:, i] - zero) * step) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return q.float()


def test_nearest_takes_the_nearest_value() -> None:
    weight = random_weight(5, 64)
    grid = grid_of(weight)
    q = nearest(weight, grid)
    for row in range(5):
        for column in range(64):
            group = column // 32
            all_values = (torch.arange(16) - grid.zero[row, group]) * grid.step[row, group]
            distance = (all_values - weight[row, column]).abs()
            assert distance[int(q[row, column])] <= distance.min() + 1e-6
    assert (values(q, grid) - weight).abs().max() <= 0.5001 * grid.step.max() + grid.step.max() / 2


def test_compensation_is_gptq_as_its_definition_says() -> None:
    weight, x = random_weight(6, 160), correlated_inputs(400, 160)
    hessian = x.T @ x / len(x)
    grid = grid_of(weight)
    same = compensated(weight, grid, hessian) == slow_compensated(weight, grid, hessian)
    assert same.float().mean() > 0.99  # a value between two may fall either way, and what follows it with it


def test_compensation_lowers_the_error_of_the_outputs() -> None:
    weight, x = random_weight(40, 128), correlated_inputs(600, 128)
    grid = grid_of(weight)
    error = lambda q: (x @ (values(q, grid) - weight).T).norm()
    assert error(compensated(weight, grid, x.T @ x / len(x))) < 0.7 * error(nearest(weight, grid))


def test_compensation_stays_within_what_a_progressive_group_may_hold() -> None:
    weight, x = random_weight(30, 256), correlated_inputs(300, 256)
    scheme = W4A8(per_group=True)
    weight[3, :128], weight[3, 5], weight[4] = weight[3, :128].abs() / 8, 4.0, 0
    grid = scheme.grid(weight, torch.ones(30, 2))
    q = compensated(weight, grid, x.T @ x / len(x))
    eighths = values(q, grid) / grid.row_scale.clamp(min=1e-30)[:, None]
    assert eighths.min() >= -128 and eighths.max() <= 127
    assert q.min() >= 0 and q.max() <= 15
    assert (values(q, grid)[4] == 0).all()


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    weight = random_weight(4, 64)
    grid = grid_of(weight)
    assert torch.equal(compensated(weight, grid, torch.zeros(64, 64)), nearest(weight, grid))
    x = correlated_inputs(100, 64)
    x[:, 7] = 0
    assert compensated(weight, grid, x.T @ x / 100).isfinite().all()


def test_clipping_chooses_each_group_by_its_weighted_error() -> None:
    weight = random_weight(7, 96) ** 3
    mean_square = torch.linspace(0.1, 4, 96)
    scheme = W4A16(32, True, torch.float32)
    grid = clipped(weight, scheme.grid, 3, mean_square)
    for row in range(7):
        for group in range(3):
            part = slice(32 * group, 32 * group + 32)
            errors = []
            for ratio in CLIP_RATIOS:
                one = scheme.grid(weight[row : row + 1, part], torch.full((1, 1), ratio))
                kept = values(nearest(weight[row : row + 1, part], one), one)
                errors.append((((kept - weight[row, part]) ** 2) * mean_square[part]).sum().item())
            expected = scheme.grid(
                weight[row : row + 1, part], torch.full((1, 1), CLIP_RATIOS[errors.index(min(errors))])
            )
            assert grid.step[row, group] == expected.step[0, 0]
    assert not torch.equal(grid.step, scheme.grid(weight, torch.ones(7, 3)).step)


def test_a_grid_is_split_with_the_rows_of_its_weight() -> None:
    weight = random_weight(10, 256)
    grid = W4A8(per_group=True).grid(weight, torch.ones(10, 2))
    first, second = grid.split([4, 6])
    q = nearest(weight, grid)
    assert torch.equal(torch.cat((values(q[:4], first), values(q[4:], second))), values(q, grid))
    assert torch.equal(second.row_scale, grid.row_scale[4:])
