"""11. LoRA on all four linear layers of a decoder layer, for 64 tokens."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Peer, Random, near, worst
from benchmarks.gpu.goals import at_most_us, times_floor
from kernels import lora
from kernels.group_rows import Groups

RANK = 16
TOKENS = {False: 64, True: 5}
# k, widths of the slices; and in the interpreter
LAYERS = {
    False: ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))),
    True: ((64, (48, 16, 16)), (48, (64,)), (64, (40, 40)), (40, (64,))),
}
# 8 % of a layer's share of a decode step of 64 rows in bf16 at its floor: 5.56 ms / 32
MAX_US = 13.9


class One(NamedTuple):
    """A linear layer's adapters."""

    y: Tensor
    before: Tensor
    x: Tensor
    a: Tensor  # [slices, adapters, rank, k]
    b: Tensor  # [adapters, n, rank]
    offsets: tuple[int, ...]


class Inputs(NamedTuple):
    linears: list[One]
    ranks: Tensor
    scales: Tensor
    groups: Groups


def _make(random: Random, small: bool, adapters: int) -> Inputs:
    tokens, held = TOKENS[small], max(1, adapters)
    linears = []
    for k, widths in LAYERS[small]:
        offsets = tuple(sum(widths[:i]) for i in range(len(widths) + 1))
        y = random.normal(tokens, offsets[-1])
        a = random.normal(len(widths), held, RANK, k, scale=k**-0.5)
        b = random.normal(held, offsets[-1], RANK, scale=RANK**-0.5)
        linears.append(One(y, y.clone(), random.normal(tokens, k), a, b, offsets))
    ids = torch.arange(tokens, device=random.device, dtype=torch.int32) % held if adapters else None
    ids = torch.full((tokens,), -1, device=random.device, dtype=torch.int32) if ids is None else ids
    return Inputs(
        linears,
        torch.full((held,), RANK, dtype=torch.int32, device=random.device),
        torch.full((held,), 2.0, dtype=torch.float32, device=random.device),
        lora.group_tokens(ids, held),
    )


def _run(given: Inputs) -> list[Tensor]:
    for one in given.linears:
        lora.lora(one.y, one.x, one.a, one.b, given.ranks, given.scales, one.offsets, given.groups)
    return [one.y for one in given.linears]


def _check(given: Inputs, found: list[Tensor]) -> Check:
    ids = given.groups.ids
    checks = []
    for one, y in zip(given.linears, found):
        h = lora.reference_shrink(one.x, one.a, given.ranks, ids)
        expected = lora.reference_expand(one.before, h, one.b, given.ranks, given.scales, one.offsets, ids)
        checks.append(near(y, expected))
    return worst(*checks)


def _bmm(given: Inputs) -> None:
    """Each token's adapter is gathered, as if there were nothing better."""
    ids = given.groups.ids.long().clamp(min=0)
    for one in given.linears:
        for index, (start, stop) in enumerate(zip(one.offsets, one.offsets[1:])):
            h = torch.bmm(one.a[index][ids], one.x[:, :, None])  # [tokens, rank, 1]
            one.y[:, start:stop] += 2 * torch.bmm(one.b[ids, start:stop], h)[:, :, 0]


def _addmm(given: Inputs) -> None:
    """One adapter for all tokens."""
    for one in given.linears:
        for index, (start, stop) in enumerate(zip(one.offsets, one.offsets[1:])):
            one.y[:, start:stop].addmm_(one.x @ one.a[index, 0].T, one.b[0, start:stop].T, alpha=2)


def cases(small: bool) -> list[Case]:
    tokens = TOKENS[small]
    row_bytes = sum(2 * k + 4 * sum(widths) for k, widths in LAYERS[small])  # x read; y read and written
    adapter_bytes = sum(2 * RANK * (len(widths) * k + sum(widths)) for k, widths in LAYERS[small])
    # name -> adapters, goals, peers
    rows = {
        "1 adapter": (1, (at_most_us(MAX_US),), (Peer("addmm", _addmm),)),
        "64 adapters": (64, (times_floor(1.5),), (Peer("bmm", _bmm),)),
        "no adapter": (0, (), ()),
    }
    made = []
    for name, (adapters, goals, peers) in rows.items():
        held = min(adapters, tokens)
        made.append(
            Case(
                name=f"LoRA r16, a layer, B64, {name}",
                number=11,
                make=partial(_make, small=small, adapters=held),
                run=_run,
                check=_check,
                bytes=held * adapter_bytes + (tokens * row_bytes if held else 0),
                goals=goals,
                peers=peers,
                importance=3,
            )
        )
    return made
