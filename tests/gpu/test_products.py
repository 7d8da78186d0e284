"""Linear layers and LoRA on the GPU, against their references, in the types that serve."""

from __future__ import annotations

from itertools import accumulate

import torch

from kernels import group_rows, grouped_linear, lora, w4a8, w4a16, w8a8
from tests.gpu.harness import (
    DEVICE,
    HALVES,
    assert_near,
    each,
    ints,
    pytestmark,  # noqa: F401
    random,
)

W4A8_SHAPES = [(1, 64, 128), (3, 40, 256), (16, 200, 1024), (17, 72, 256), (65, 130, 384), (300, 130, 128)]


@each("dtype", HALVES)
@each("case", w4a16.CASES)
def test_w4a16(case: tuple[int, int, int, int, bool], dtype: torch.dtype) -> None:
    m, n, k, group, zero_points = case
    weight = w4a16.quantize(random(n, k) / k**0.5, group, zero_points, dtype)
    x, bias = random(m, k, dtype=dtype), random(n, dtype=dtype, seed=1)
    assert_near(w4a16.w4a16(x, weight, bias), w4a16.reference(x, weight, bias))


@each("dtype", (*HALVES, torch.float32))
@each("case", grouped_linear.CASES)
def test_experts(case: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    tokens, places, experts, n, k = case
    chosen = random(tokens, experts).argsort(1)[:, :places]
    weights = grouped_linear.weights_of((random(experts, n, k, dtype=dtype, seed=1) / k**0.5).unbind())
    x, plan = random(tokens, k, dtype=dtype), grouped_linear.plan(chosen, experts)
    measured = grouped_linear.grouped_linear(x, weights, plan, gathers=True)
    assert_near(measured, grouped_linear.reference(x, weights, plan, gathers=True))


@each("dtype", (*HALVES, torch.float32))
@each("case", w8a8.CASES)
def test_w8a8(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = case
    x, weight = w8a8.quantize(random(m, k)), w8a8.quantize(random(n, k, seed=1))
    bias = random(n, dtype=dtype, seed=1)
    measured = w8a8.w8a8(x, weight.q, weight.scale, bias, dtype)
    assert_near(measured, w8a8.reference(x, weight.q, weight.scale, bias, dtype))


@each("m, n, k", [(64, 256, 4096), (1, 128, 131_071)])
def test_the_integer_sums_of_w8a8_are_exact(m: int, n: int, k: int) -> None:
    """With scales of 1 and a float32 result up to 2^24, that is the sum itself."""
    generator = torch.Generator().manual_seed(0)
    q_x, q_w = (torch.randint(-2, 3, (rows, k), generator=generator).to(DEVICE, torch.int8) for rows in (m, n))
    x = w8a8.quantize(random(m, k))._replace(q=q_x, scale=torch.ones(m, device=DEVICE))
    measured = w8a8.w8a8(x, q_w, torch.ones(n, device=DEVICE), None, torch.float32)
    assert torch.equal(measured.double(), q_x.double() @ q_w.double().T)


@each("dtype", HALVES)
@each("shape", w8a8.ROWS_CASES)
def test_rows_are_quantised(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    made, expected = w8a8.quantize(x), w8a8.int8_rows.reference(x)
    assert_near(made.scale, expected.scale)
    assert torch.equal(made.sums, w8a8.int8_rows.group_sums(made.q))
    difference = (made.q.int() - expected.q.int()).abs()
    assert difference.sum() <= 0.01 * difference.numel()  # a tie may fall either way


@each("dtype", HALVES)
@each("per_group", (True, False))
@each("case", W4A8_SHAPES)
def test_w4a8(case: tuple[int, int, int], per_group: bool, dtype: torch.dtype) -> None:
    m, n, k = case
    x, weight = w8a8.quantize(random(m, k)), w4a8.quantize(random(n, k, seed=1) / k**0.5, per_group)
    bias = random(n, dtype=dtype, seed=1)
    assert_near(w4a8.w4a8(x, weight, bias, dtype), w4a8.reference(x, weight, bias, dtype))


@each("dtype", HALVES)
@each("case", lora.CASES)
def test_lora(case: tuple[int, tuple[int, ...], int, int, tuple[int, ...]], dtype: torch.dtype) -> None:
    tokens, ranks, max_rank, k, widths = case
    offsets = (0, *accumulate(widths))
    x, y = random(tokens, k, dtype=dtype), random(tokens, offsets[-1], dtype=dtype)
    a = (random(len(widths), len(ranks), max_rank, k) / k**0.5).to(dtype)
    b = (random(len(ranks), offsets[-1], max_rank) / max_rank**0.5).to(dtype)
    adapters = ints([token % (len(ranks) + 1) - 1 for token in range(1, tokens + 1)])
    ranks, scales = ints(ranks), random(len(ranks)).abs() + 0.5
    h = lora.reference_shrink(x, a, ranks, adapters)
    expected = lora.reference_expand(y, h, b, ranks, scales, offsets, adapters)
    measured = y.clone()
    lora.lora(measured, x, a, b, ranks, scales, offsets, lora.group_tokens(adapters, len(ranks)))
    assert_near(measured, expected)
    assert torch.equal(measured[adapters < 0], y[adapters < 0])


@each("rows, groups", [(2, 8), (420, 60), (24, 128), (10_000, 8)])
def test_rows_are_grouped(rows: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-1, groups, (rows,), generator=generator).to(DEVICE, torch.int32)
    made, expected = (make(ids, groups, 16) for make in (group_rows.group_rows, group_rows.reference_groups))
    assert torch.equal(made.tile_group, expected.tile_group)
    used = int((expected.tile_group >= 0).sum()) * 16
    assert torch.equal(made.rows[:used], expected.rows[:used])
