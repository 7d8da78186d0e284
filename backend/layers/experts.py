"""A mixture of experts in the place of an mlp, on torch's operators: the reference of kernels/cpu/native/mixture.h.

Each token is multiplied with its own experts only, and their results are added in the order in which the router lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from backend.architectures.description import Block, Experts
from backend.layers.activation import activate
from backend.layers.linear import DenseLinear, Linear
from kernels.common.triton_runtime import runs_on
from kernels.grouped_linear import Weights, grouped_linear, weights_of
from kernels.grouped_linear import plan as make_plan


@dataclass(slots=True)
class MlpWeights:
    gate_up: Linear  # [2 * intermediate, hidden], rows in the order gate, up; without a gate up alone, [intermediate, hidden]
    down: Linear  # [hidden, intermediate]


@dataclass(slots=True)
class ExpertsWeights:
    settings: Experts
    router: Linear  # [experts, and one more row where there is a shared gate, hidden]
    choice_bias: Tensor | None  # float32 [experts]
    experts: list[MlpWeights]  # this rank's
    first: int  # the number of experts[0] among all
    shared: MlpWeights | None
    grouped: tuple[Weights, Weights] | None = field(init=False)  # gate and up, and down, for one launch each on a GPU

    def __post_init__(self) -> None:
        gate_up, down = (
            [each for each in part if type(each) is DenseLinear]
            for part in ([mlp.gate_up for mlp in self.experts], [mlp.down for mlp in self.experts])
        )
        is_whole = len(gate_up) == len(down) == self.settings.count  # else some are in another form, or another rank's
        self.grouped = (_stacked(gate_up), _stacked(down)) if is_whole and runs_on(gate_up[0].weight) else None

    @property
    def linears(self) -> list[Linear]:
        mlps = self.experts if self.shared is None else [*self.experts, self.shared]
        return [self.router, *(linear for mlp in mlps for linear in (mlp.gate_up, mlp.down))]


class Choice(NamedTuple):
    experts: Tensor  # int64 [tokens, places], those of the greatest scores first
    weights: Tensor  # float32 [tokens, places]


def choose(logits: Tensor, settings: Experts, choice_bias: Tensor | None) -> Choice:
    """logits [tokens, experts] of the router."""
    scores = logits.float().softmax(-1) if settings.scores == "softmax" else logits.float().sigmoid()
    ranked = scores if choice_bias is None else scores + choice_bias
    if settings.kept_groups < settings.groups:
        grouped = ranked.unflatten(1, (settings.groups, -1))
        best = grouped.topk(min(2, grouped.shape[2]) if settings.adds_two_best else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _greatest(best, settings.kept_groups), True)
        ranked = grouped.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
    chosen = _greatest(ranked, settings.places)
    weights = scores.gather(1, chosen)
    if settings.is_normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    return Choice(chosen, weights * settings.scale)


def mix(x: Tensor, weights: ExpertsWeights, block: Block) -> Tensor:
    """x [tokens, hidden] -> [tokens, hidden] in its dtype."""
    logits, settings = weights.router(x), weights.settings
    chosen, factors = choose(logits[:, : settings.count], settings, weights.choice_bias)
    parts = torch.zeros(chosen.numel(), x.shape[1], dtype=torch.float32, device=x.device)
    if weights.grouped is not None:
        _in_groups(x, chosen, weights.grouped, block, parts)
    else:
        _one_by_one(x, chosen - weights.first, weights.experts, block, parts)
    total = (parts.view(*chosen.shape, -1) * factors[:, :, None]).sum(1)
    if weights.shared is not None:
        shared = _mlp(x, weights.shared, block).float()
        total += shared * logits[:, settings.count :].float().sigmoid() if settings.has_shared_gate else shared
    return total.to(x.dtype)


def _in_groups(x: Tensor, chosen: Tensor, weights: tuple[Weights, Weights], block: Block, parts: Tensor) -> None:
    """Fills parts [tokens * places, hidden]. Nothing here waits for the GPU."""
    gate_up, down = weights
    plan = make_plan(chosen, len(gate_up.tensors))
    given = grouped_linear(x, gate_up, plan, gathers=True)
    activated = activate(given, block)
    parts[plan.order] = grouped_linear(activated, down, plan, gathers=False).float()


def _one_by_one(x: Tensor, chosen: Tensor, experts: list[MlpWeights], block: Block, parts: Tensor) -> None:
    """The same for experts in any form; others than `experts` are another rank's."""
    flat = chosen.flatten()
    for index in flat.unique().tolist():
        if 0 <= index < len(experts):
            pairs = (flat == index).nonzero()[:, 0]
            parts[pairs] = _mlp(x[pairs // chosen.shape[1]], experts[index], block).float()


def _stacked(linears: list[DenseLinear]) -> Weights:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return weights_of(tuple(linear.weight for linear in linears), tuple(biases))


def _mlp(x: Tensor, weights: MlpWeights, block: Block) -> Tensor:
    """x [tokens, hidden] -> [tokens, hidden]."""
    return weights.down(activate(weights.gate_up(x), block))


def _greatest(x: Tensor, count: int) -> Tensor:
    """The columns of the `count` greatest numbers of each row, the greatest first, the lowest column among equals."""
    return x.argsort(dim=-1, descending=True, stable=True)[:, :count]
