"""8, 9 and 10. Linear layers of quantised weights: W4A16, W8A8, W4A8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Peer, Random, near
from benchmarks.gpu.cases import products
from benchmarks.gpu.goals import Goal, of_floor, than_peer, than_row
from kernels import w4a8, w4a16, w8a8
from kernels.int8_rows import Int8Rows, group_sums

GROUP = 128
# Llama-3-8B: n, k; and in the interpreter
LAYERS = {
    "gate_up": ((28672, 4096), (72, 256)),
    "down": ((4096, 14336), (64, 384)),
    "qkv": ((6144, 4096), (48, 256)),
    "o": ((4096, 4096), (40, 128)),
}
TOKENS = {1: 1, 16: 3, 64: 18, 256: 66, 2048: 70, 8192: 260}  # m, and in the interpreter
MAX_CHECKED = 512  # rows


class Inputs(NamedTuple):
    x: Tensor | Int8Rows
    weight: tuple
    n: int
    k: int


def _int8(random: Random, *shape: int) -> Tensor:
    return random.integers(-127, 128, *shape, dtype=torch.int8)


def _rows(random: Random, m: int, k: int) -> Int8Rows:
    q = _int8(random, m, k)
    return Int8Rows(q, random.normal(m, dtype=torch.float32).abs() / 100, group_sums(q))


def _make_w4a16(random: Random, m: int, n: int, k: int) -> Inputs:
    packed = random.integers(0, 256, n, k // 2, dtype=torch.uint8)
    scales = (0.02 + random.normal(k // GROUP, n, dtype=torch.float32, scale=0.002)).to(random.dtype)
    zeros = random.integers(6, 11, k // GROUP, n, dtype=torch.int32).to(random.dtype)
    return Inputs(random.normal(m, k), w4a16.Weight4(packed, scales, zeros, GROUP), n, k)


def _make_w8a8(random: Random, m: int, n: int, k: int) -> Inputs:
    scale = random.normal(n, dtype=torch.float32).abs() / 1000
    return Inputs(_rows(random, m, k), (_int8(random, n, k), scale), n, k)


def _make_w4a8(random: Random, m: int, n: int, k: int, per_group: bool) -> Inputs:
    packed = random.integers(0, 256, n, k // 2, dtype=torch.uint8)
    groups = k // GROUP if per_group else 1
    scales = random.integers(1, 9, groups, n, dtype=torch.int8) if per_group else None
    zeros = random.integers(0, 16, groups, n, dtype=torch.uint8)
    scale = random.normal(n, dtype=torch.float32).abs() / 1000
    return Inputs(_rows(random, m, k), w4a8.Weight4A8(packed, scale, scales, zeros), n, k)


def _some(x: Inputs, out: Tensor) -> tuple[Tensor | Int8Rows, Tensor]:
    """Rows to be checked, and what came out for them; the last one among them."""
    chosen = torch.linspace(0, len(out) - 1, min(MAX_CHECKED, len(out)), device=out.device).long()
    rows = Int8Rows(*(part[chosen] for part in x.x)) if isinstance(x.x, Int8Rows) else x.x[chosen]
    return rows, out[chosen]


def _check_w4a16(x: Inputs, out: Tensor) -> Check:
    rows, found = _some(x, out)
    return near(found, w4a16.reference(rows, x.weight, None))


def _check_w8a8(x: Inputs, out: Tensor) -> Check:
    rows, found = _some(x, out)
    return near(found, w8a8.reference(rows, *x.weight, None, out.dtype))


def _check_w4a8(x: Inputs, out: Tensor) -> Check:
    rows, found = _some(x, out)
    return near(found, w4a8.reference(rows, x.weight, None, out.dtype))


def _w8a8_name(layer: str, m: int) -> str:
    return f"W8A8 {layer} M={m}"


def _w4a16_goals(layer: str, m: int) -> tuple[Goal, ...]:
    return (of_floor(0.65, 0.75),) if m <= 16 else (of_floor(0.55),) if m == 256 else ()


def _w8a8_goals(layer: str, m: int) -> tuple[Goal, ...]:
    return (of_floor(0.75, 0.85),) if m <= 64 else (than_peer(products.FP8, 0.6),) if m >= 1024 else ()


def _w4a8_goals(layer: str, m: int) -> tuple[Goal, ...]:
    return (of_floor(0.60, 0.75),) if m <= 64 else (than_row(_w8a8_name(layer, m), 1.0),) if m == 256 else ()


class Kind(NamedTuple):
    name: str
    number: int
    make: Callable
    run: Callable
    check: Callable
    weight_bytes: float  # bytes of one element
    x_bytes: int
    goals: Callable[[str, int], tuple[Goal, ...]]
    peers: Callable[[int], tuple[Peer, ...]]


KINDS = (
    Kind("W4A16", 8, _make_w4a16, lambda x: w4a16.w4a16(x.x, x.weight), _check_w4a16, 0.5 + 4 / GROUP, 2,
         _w4a16_goals, lambda m: (products.tinygemm(m), products.CUBLAS)),
    Kind("W8A8", 9, _make_w8a8, lambda x: w8a8.w8a8(x.x, *x.weight), _check_w8a8, 1.0, 1,
         _w8a8_goals, lambda m: (products.SCALED_MM, products.INT_MM, products.CUBLAS)),
    Kind("W4A8 g128", 10, partial(_make_w4a8, per_group=True), lambda x: w4a8.w4a8(x.x, x.weight), _check_w4a8,
         0.5 + 2 / GROUP, 1, _w4a8_goals, lambda m: (products.tinygemm(m),)),
    Kind("W4A8 channel", 10, partial(_make_w4a8, per_group=False), lambda x: w4a8.w4a8(x.x, x.weight), _check_w4a8,
         0.5, 1, _w4a8_goals, lambda m: (products.tinygemm(m),)),
)  # fmt: skip


def _importance(layer: str, m: int) -> int:
    """gate_up is two fifths of the model, and decoding has few rows."""
    if m > 256:
        return 3 if layer == "gate_up" else 5
    return 1 if layer == "gate_up" else 3 if layer == "down" else 4


def cases(small: bool) -> list[Case]:
    return [_case(kind, layer, m, small) for kind in KINDS for layer in LAYERS for m in TOKENS]


def _case(kind: Kind, layer: str, m: int, small: bool) -> Case:
    (n, k), count = LAYERS[layer][small], TOKENS[m] if small else m
    return Case(
        name=f"{kind.name} {layer} M={m}",
        number=kind.number,
        make=partial(kind.make, m=count, n=n, k=k),
        run=kind.run,
        check=kind.check,
        bytes=int(n * k * kind.weight_bytes + count * (kind.x_bytes * k + 2 * n)),
        flops=2 * count * n * k,
        rate="bf16" if kind.x_bytes == 2 else "int8",
        goals=kind.goals(layer, m),
        peers=kind.peers(m),
        importance=_importance(layer, m),
    )
