"""4 and 6. What is bound by memory alone: residual + RMSNorm, SiLU gate, and their int8 forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Peer, Random, int8_rows, near, worst
from benchmarks.gpu.cases.compiled import compiled
from benchmarks.gpu.goals import at_most_us, of_floor
from kernels import activation, norm
from kernels.int8_rows import Int8Rows

EPS = 1e-5
NORM_ROWS = {64: 3, 256: 5, 8192: 9}  # rows on a GPU: rows in the interpreter
NORM_GOALS = {64: (at_most_us(2.5),), 256: (), 8192: (of_floor(0.85),)}
GATE_ROWS = {256: 3, 8192: 7}


class Norm(NamedTuple):
    x: Tensor
    residual: Tensor
    weight: Tensor


def _make_norm(random: Random, rows: int, hidden: int) -> Norm:
    return Norm(random.normal(rows, hidden), random.normal(rows, hidden), 1 + random.normal(hidden, scale=0.1))


def _make_gate(random: Random, rows: int, intermediate: int) -> Tensor:
    return random.normal(rows, 2 * intermediate)


def _check_norm(x: Norm, out: tuple[Tensor, Tensor]) -> Check:
    total = x.x.float() + x.residual.float()
    return worst(near(out[1], total), near(out[0], norm.reference(out[1].float(), x.weight.float(), EPS)))


def _check_norm_int8(x: Norm, out: tuple[Int8Rows, Tensor]) -> Check:
    total = x.x.float() + x.residual.float()
    return worst(near(out[1], total), int8_rows(out[0], norm.reference_int8(out[1], x.weight, EPS)))


def _eager_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _eager_norm_int8(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Int8Rows, Tensor]:
    total = x + residual
    return norm.reference_int8(total, weight, EPS), total


def _compiled(function: Callable[..., object]) -> Peer:
    return Peer("torch.compile", lambda x: compiled(function)(*x), compiles=True)


def _case(name: str, number: int, make: Callable, run: Callable, check: Callable, bytes: int, goals: tuple, *peers: Peer,
          is_warm: bool = False) -> Case:  # fmt: skip
    return Case(name, number, make, run, check, bytes, goals=goals, peers=peers, is_warm=is_warm)


def cases(small: bool) -> list[Case]:
    hidden, intermediate = (256, 384) if small else (4096, 14336)
    made = []
    for rows, few in NORM_ROWS.items():
        count = few if small else rows
        make = partial(_make_norm, rows=count, hidden=hidden)
        goals, is_warm = NORM_GOALS[rows], rows == 64
        made += [
            _case(
                f"add + RMSNorm {rows} x 4096", 4, make, lambda x: norm.add_norm(*x, EPS), _check_norm,
                8 * count * hidden, goals, Peer("eager F.rms_norm", lambda x: _eager_norm(*x)), _compiled(_eager_norm),
                is_warm=is_warm,
            ),
            _case(
                f"add + RMSNorm + int8 {rows} x 4096", 4, make, lambda x: norm.add_norm_int8(*x, EPS),
                _check_norm_int8, 7 * count * hidden, goals, _compiled(_eager_norm_int8), is_warm=is_warm,
            ),
        ]  # fmt: skip
    for rows, few in GATE_ROWS.items():
        count = few if small else rows
        make = partial(_make_gate, rows=count, intermediate=intermediate)
        made += [
            _case(
                f"SiLU gate {rows} x 14336", 6, make, activation.activate,
                lambda x, out: near(out, activation.reference(x.float())), 6 * count * intermediate, (of_floor(0.85),),
                Peer("eager", activation.reference),
                Peer("torch.compile", lambda x: compiled(activation.reference)(x), compiles=True),
            ),
            _case(
                f"SiLU gate + int8 {rows} x 14336", 6, make, activation.activate_int8,
                lambda x, out: int8_rows(out, activation.reference_int8(x)), 5 * count * intermediate, (of_floor(0.85),),
                Peer("torch.compile", lambda x: compiled(activation.reference_int8)(x), compiles=True),
            ),
        ]  # fmt: skip
    return made
