"""The values that a quantised weight may take, and rounding to them.

    w[n, k] = (q[n, k] - zero[n, g]) * step[n, g]        q_min[n, g] <= q <= q_max[n, g],  g = k / (columns of a group)

Two ways to choose q. `nearest` takes the nearest value, weight by weight. `compensated` is GPTQ (Frantar et al., 2022):
columns are rounded one after another, those with the largest inputs first, and the error of a column is made up for by the
columns that are still to come, so that the layer's output changes least on the calibration text. With H = the mean of x x^T
over its tokens and U the upper Cholesky factor of (H + damping)^-1:

    error = (w[:, i] - rounded) / U[i, i];   w[:, j] -= error * U[i, j]  for all j after i

`clipped` chooses for each group how much of its range the grid spans (AWQ, Lin et al., 2023): the ratio with the least error,
each weight's weighted by its input's mean square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
DAMPING = 0.01  # this share of the mean of the diagonal of H is added to the diagonal
COLUMNS_AT_ONCE = 128
WORTH_THREADS = 1 << 20  # elements


class Grid(NamedTuple):
    """The values that the weights of a layer may take, as tables of float32 [n, groups].

    zero, q_min and q_max are whole numbers. A step of 0 means that all weights of the group are 0.
    """

    step: Tensor
    zero: Tensor
    q_min: Tensor
    q_max: Tensor
    row_scale: Tensor | None = (
        None  # [n]: in formats with two levels of scales, the steps of a row are whole multiples of it
    )

    def split(self, rows: list[int]) -> list[Grid]:
        """Cut the grid of a stacked weight into the grids of its parts, which have `rows` rows each."""
        parts = [[None] * len(rows) if part is None else part.split(rows) for part in self]
        return [Grid(*of_one) for of_one in zip(*parts)]


# (weight [n, k], ratio [n, groups]) -> a grid that spans this ratio of the range of each group
MakeGrid = Callable[[Tensor, Tensor], Grid]


def nearest(weight: Tensor, grid: Grid) -> Tensor:
    """Round weight [n, k] to the nearest values of the grid; returns q float32 [n, k], whole numbers."""
    grouped = weight.unflatten(1, (grid.step.shape[1], -1))
    step, zero, q_min, q_max = (part[:, :, None] for part in grid[:4])
    q = (grouped / _divisor(step)).round() + zero
    return torch.minimum(torch.maximum(q, q_min), q_max).flatten(1)


def values(q: Tensor, grid: Grid) -> Tensor:
    """Dequantise q [n, k]; returns the weight float32 [n, k]."""
    grouped: Tensor = q.unflatten(1, (grid.step.shape[1], -1))
    return ((grouped - grid.zero[:, :, None]) * grid.step[:, :, None]).flatten(1)


def compensated(weight: Tensor, grid: Grid, hessian: Tensor) -> Tensor:
    """Round weight [n, k] by GPTQ with hessian [k, k]; returns q float32 [n, k]."""
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _inverse_factor(hessian[order][:, order])
    groups = order // (weight.shape[1] // grid.step.shape[1])  # the group of each column
    step, zero, q_min, q_max = (part[:, groups] for part in grid[:4])
    divisor = _divisor(step)
    w = weight[:, order].clone()
    q = torch.empty_like(w)
    k = w.shape[1]
    for first in range(0, k, COLUMNS_AT_ONCE):
        last = min(first + COLUMNS_AT_ONCE, k)
        errors = w.new_empty(len(w), last - first)
        with _one_thread_for(len(w) * COLUMNS_AT_ONCE):
            for i in range(first, last):
                q[:, i] = ((w[:, i] / divisor[:, i]).round() + zero[:, i]).clamp(q_min[:, i], q_max[:, i])
                error = (w[:, i] - (q[:, i] - zero[:, i]) * step[:, i]) / factor[i, i]
                w[:, i:last] -= error[:, None] * factor[i, i:last]
                errors[:, i - first] = error
        w[:, last:] -= errors @ factor[first:last, last:]
    return q[:, order.argsort()]


@contextmanager
def _one_thread_for(elements: int) -> Iterator[None]:
    """Use one torch thread if an operator has few elements: it would spend its time waiting for other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if elements < WORTH_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def clipped(
    weight: Tensor, make_grid: MakeGrid, groups: int, mean_square: Tensor, ratios: tuple[float, ...] = CLIP_RATIOS
) -> Grid:
    """Choose the ratio of the range for each group of weight [n, k]; mean_square [k] is that of its inputs."""
    best = weight.new_full((len(weight), groups), torch.inf)
    ratio = torch.ones_like(best)
    for candidate in ratios:
        tried = torch.full_like(best, candidate)
        grid = make_grid(weight, tried)
        errors = (values(nearest(weight, grid), grid) - weight).square_().mul_(mean_square)
        errors = errors.unflatten(1, (groups, -1)).sum(2)
        ratio = torch.where(errors < best, tried, ratio)
        best = torch.minimum(errors, best)
    return make_grid(weight, ratio)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the damped inverse, float32. An input that is always 0 is treated as nearly so."""
    damped = hessian.double()
    mean = damped.diagonal().mean()
    damped.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _divisor(step: Tensor) -> Tensor:
    return torch.where(step > 0, step, torch.inf)
