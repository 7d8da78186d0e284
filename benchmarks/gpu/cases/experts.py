"""13. Products of a mixture's experts in one launch: gate and up of a step, in bfloat16."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Peer, Random, near
from benchmarks.gpu.goals import Goal, of_floor
from kernels import grouped_linear as kernel


class Shape(NamedTuple):
    experts: int
    places: int  # experts of a token
    n: int
    k: int


# of published models, and in the interpreter
SHAPES = {
    "Qwen3-30B-A3B": (Shape(128, 8, 1536, 2048), Shape(6, 2, 72, 64)),
    "gpt-oss-20b": (Shape(32, 4, 5760, 2880), Shape(4, 2, 40, 96)),
}
TOKENS = {1: 1, 16: 3, 64: 9, 256: 40}  # and in the interpreter


class Inputs(NamedTuple):
    x: Tensor  # [tokens, k]
    weights: kernel.Weights
    plan: kernel.Plan
    stacked: Tensor  # [experts, n, k]


def _make(random: Random, tokens: int, shape: Shape) -> Inputs:
    stacked = random.normal(shape.experts, shape.n, shape.k, scale=shape.k**-0.5)
    chosen = torch.stack([random.order(shape.experts)[: shape.places] for _ in range(tokens)])
    weights = kernel.weights_of(stacked.unbind())
    return Inputs(random.normal(tokens, shape.k), weights, kernel.plan(chosen, shape.experts), stacked)


def _run(inputs: Inputs) -> Tensor:
    return kernel.grouped_linear(inputs.x, inputs.weights, inputs.plan, gathers=True)


def _check(inputs: Inputs, out: Tensor) -> Check:
    return near(out, kernel.reference(inputs.x, inputs.weights, inputs.plan, gathers=True))


def _make_grouped_mm(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    rows = inputs.x[inputs.plan.order // inputs.plan.places]
    return rows, inputs.stacked.transpose(1, 2), inputs.plan.first[1:].contiguous()


GROUPED_MM = Peer(
    "torch._grouped_mm", lambda given: torch._grouped_mm(given[0], given[1], offs=given[2]), _make_grouped_mm
)


def _read(tokens: int, shape: Shape) -> float:
    """Experts that some token has, where routers choose at random."""
    return shape.experts * (1 - (1 - shape.places / shape.experts) ** tokens)


def _goals(tokens: int) -> tuple[Goal, ...]:
    return (of_floor(0.60, 0.75),) if tokens <= 64 else ()


def cases(small: bool) -> list[Case]:
    return [_case(name, tokens, small) for name in SHAPES for tokens in TOKENS]


def _case(name: str, tokens: int, small: bool) -> Case:
    shape, count = SHAPES[name][small], TOKENS[tokens] if small else tokens
    rows = count * shape.places
    return Case(
        name=f"experts {name} M={tokens}",
        number=13,
        make=partial(_make, tokens=count, shape=shape),
        run=_run,
        check=_check,
        bytes=int(2 * (_read(count, shape) * shape.n * shape.k + count * shape.k + rows * shape.n)),
        flops=2 * rows * shape.n * shape.k,
        goals=_goals(tokens),
        peers=(GROUPED_MM,),
        importance=2,
    )
