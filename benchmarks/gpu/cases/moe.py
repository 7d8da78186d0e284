"""Experts: Mixtral-8x7B's products, which the project's table of goals does not have."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Peer, Random, near
from kernels import moe

EXPERTS, TOP_K = 8, 2
TOKENS = {64: 5, 2048: 9}  # tokens on a GPU: tokens in the interpreter
LAYERS = {"gate_up": ((28672, 4096), (40, 64)), "down": ((4096, 14336), (64, 40))}  # n, k
MAX_CHECKED = 256  # rows


class Inputs(NamedTuple):
    x: Tensor  # [tokens, k], or of `down` [tokens * TOP_K, k]
    w: Tensor
    groups: moe.Groups
    weights: Tensor  # [tokens, TOP_K]


def _make(random: Random, tokens: int, n: int, k: int, sums: bool) -> Inputs:
    weights, ids = moe.route(random.normal(tokens, EXPERTS, dtype=torch.float32), TOP_K, True)
    groups = moe.group_rows(ids, EXPERTS, moe.block_m_for(tokens * TOP_K, EXPERTS))
    w = torch.stack([random.normal(n, k, scale=k**-0.5) for _ in range(EXPERTS)])
    return Inputs(random.normal(tokens * (TOP_K if sums else 1), k), w, groups, weights)


def _product(given: Inputs) -> Tensor:
    return moe.grouped_matmul(given.x, given.w, given.groups, TOP_K)


def _sum(given: Inputs) -> Tensor:
    return moe.grouped_matmul_sum(given.x, given.w, given.groups, given.weights)


def _check_product(given: Inputs, out: Tensor) -> Check:
    rows = min(MAX_CHECKED, len(out))
    expected = moe.reference(given.x[: rows // TOP_K], given.w, given.groups.ids[:rows], TOP_K)
    return near(out[:rows], expected)


def _check_sum(given: Inputs, out: Tensor) -> Check:
    tokens = min(MAX_CHECKED // TOP_K, len(out))
    pairs = moe.reference(given.x[: tokens * TOP_K], given.w, given.groups.ids[: tokens * TOP_K], 1)
    return near(out[:tokens], moe.reference_sum(pairs, given.weights[:tokens]))


class Sorted(NamedTuple):
    x: Tensor  # rows in the order of their experts
    w: Tensor  # [experts, k, n]
    ends: Tensor


def _make_sorted(given: Inputs) -> Sorted:
    ids = given.groups.ids
    order = ids.argsort()
    source = order if len(given.x) == len(ids) else order // TOP_K
    return Sorted(given.x[source], given.w.transpose(1, 2), ids.bincount(minlength=EXPERTS).cumsum(0).int())


GROUPED_MM = Peer("_grouped_mm", lambda given: torch._grouped_mm(given.x, given.w, offs=given.ends), _make_sorted)


def cases(small: bool) -> list[Case]:
    made = []
    for layer, sizes in LAYERS.items():
        n, k = sizes[small]
        sums = layer == "down"
        for tokens, few in TOKENS.items():
            count = few if small else tokens
            rows = count * TOP_K
            read, written = (rows, count) if sums else (count, rows)
            made.append(
                Case(
                    name=f"MoE {layer} {tokens} tokens",
                    number=0,
                    make=partial(_make, tokens=count, n=n, k=k, sums=sums),
                    run=_sum if sums else _product,
                    check=_check_sum if sums else _check_product,
                    bytes=2 * (EXPERTS * n * k + read * k + written * n),
                    flops=2 * rows * n * k,
                    peers=(GROUPED_MM,),
                    importance=4,
                )
            )
    return made
