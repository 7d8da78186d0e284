"""14 and 15. The recurrence of a layer with a state, and the convolution before it: rows that generate, and a prompt.

The floor is that of memory: each state is read and written once, inputs and outputs once. A prompt's tokens run one by one, so
its row is bound by how long a token takes, which no floor knows.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Random, near, worst
from benchmarks.gpu.goals import Goal, of_floor
from kernels import causal_convolution, linear_recurrence
from kernels.common.state_rows import StateRows


class Shape(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def window(self) -> tuple[int, int]:
        return self.taps - 1, self.channels

    @property
    def matrix(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim


# of published models, and in the interpreter
SHAPES = {
    "Qwen3.5-0.8B": (Shape(16, 16, 128, 128), Shape(2, 2, 16, 8)),
    "Qwen3-Next": (Shape(16, 32, 128, 128), Shape(1, 2, 24, 12)),
}
# rows and tokens of each, on a GPU and in the interpreter
STEPS = {"B1": ((1, 1), (1, 1)), "B16": ((16, 1), (2, 1)), "B64": ((64, 1), (3, 1)), "4k": ((1, 4096), (1, 9))}
EPS = 1e-6


class Inputs(NamedTuple):
    given: tuple[Tensor, ...]  # what the kernel reads beside states
    states: Tensor
    before: Tensor  # a copy of them
    rows: StateRows


def _rows(rows: int, tokens: int, random: Random) -> StateRows:
    """Rows that go on, each in its own state."""
    numbers = np.stack((np.arange(rows), np.arange(rows), np.full(rows, tokens)), 1).astype(np.int32)
    starts = np.arange(rows + 1, dtype=np.int64) * tokens
    return StateRows(starts, numbers, np.zeros((0, 3), np.int32)).placed_on(random.device)


def _of_length_one(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + EPS)


def _make_recurrence(random: Random, rows: int, tokens: int, shape: Shape) -> Inputs:
    count, real = rows * tokens, torch.float32
    q, k = (_of_length_one(random.normal(count, shape.key_heads, shape.key_dim, dtype=real)) for _ in range(2))
    v = random.normal(count, shape.value_heads, shape.value_dim, dtype=real)
    decay, strength = (random.normal(count, shape.value_heads, dtype=real).sigmoid() for _ in range(2))
    states = random.normal(rows, *shape.matrix, dtype=real)
    return Inputs((q, k, v, decay, strength), states, states.clone(), _rows(rows, tokens, random))


def _make_convolution(random: Random, rows: int, tokens: int, shape: Shape) -> Inputs:
    u = random.normal(rows * tokens, shape.channels, dtype=torch.float32)
    weight = random.normal(shape.channels, shape.taps, dtype=torch.float32)
    states = random.normal(rows, *shape.window, dtype=torch.float32)
    return Inputs((u, weight), states, states.clone(), _rows(rows, tokens, random))


def _recur(inputs: Inputs) -> tuple[Tensor, Tensor]:
    o = linear_recurrence.linear_recurrence(*inputs.given, inputs.states, inputs.rows, True)
    return o, inputs.states


def _convolve(inputs: Inputs) -> tuple[Tensor, Tensor]:
    u, weight = inputs.given
    y = causal_convolution.causal_convolution(u, weight, None, inputs.states, inputs.rows, True)
    return y, inputs.states


def _check_recurrence(inputs: Inputs, out: tuple[Tensor, Tensor]) -> Check:
    states = inputs.before.clone()
    o = linear_recurrence.reference(*inputs.given, states, inputs.rows, True)
    return worst(near(out[0], o), near(out[1], states))


def _check_convolution(inputs: Inputs, out: tuple[Tensor, Tensor]) -> Check:
    u, weight = inputs.given
    states = inputs.before.clone()
    y = causal_convolution.reference(u, weight, None, states, inputs.rows, True)
    return worst(near(out[0], y), near(out[1], states))


def _goals(rows: int) -> tuple[Goal, ...]:
    return (of_floor(0.60, 0.80),) if rows >= 16 else ()


def cases(small: bool) -> list[Case]:
    return [made for name in SHAPES for step in STEPS for made in _cases(name, step, small)]


def _cases(name: str, step: str, small: bool) -> list[Case]:
    shape, (rows, tokens) = SHAPES[name][small], STEPS[step][small]
    sizes = dict(rows=rows, tokens=tokens, shape=shape)
    count, values = rows * tokens, shape.value_heads * shape.value_dim
    matrices, windows = (rows * int(np.prod(each)) for each in (shape.matrix, shape.window))
    of_recurrence = 4 * (2 * matrices + count * (shape.channels + values + 2 * shape.value_heads))
    of_convolution = 4 * (2 * windows + 2 * count * shape.channels + shape.channels * shape.taps)
    goals = _goals(STEPS[step][0][0])
    made = partial(_make_recurrence, **sizes), _recur, _check_recurrence
    convolved = partial(_make_convolution, **sizes), _convolve, _check_convolution
    return [
        Case(f"recurrence {name} {step}", 14, *made, of_recurrence, goals=goals),
        Case(f"convolution {name} {step}", 15, *convolved, of_convolution),
    ]
