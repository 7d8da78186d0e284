"""Recurrent layers' kernels on the GPU: the references' numbers, and the same bits however a sequence is cut."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import causal_convolution, linear_recurrence
from kernels.common.state_rows import StateRows
from tests.gpu.harness import (
    DEVICE,
    IS_GPU,
    assert_near,
    each,
    pytestmark,  # noqa: F401
    random,
)
from tests.kernels.state_steps import Given, every_kind, rows_of

TOKENS = 700 if IS_GPU else 7
# key heads, value heads, key_dim, value_dim: of Qwen3.5-0.8B, Qwen3-Next, Mamba 2; the largest; odd ones
SHAPES = [(16, 16, 128, 128), (16, 32, 128, 128), (1, 64, 128, 64), (2, 4, 256, 256), (3, 6, 80, 12)]
SHAPES = SHAPES if IS_GPU else [(1, 2, 16, 8), SHAPES[-1]]
# taps, channels
WINDOWS = [(4, 6144), (4, 8192), (3, 1024), (2, 70)] if IS_GPU else [(4, 130), (2, 70)]


def recurrence_of(shape: tuple[int, int, int, int], tokens: int) -> tuple[list[Tensor], Tensor]:
    """Arguments of the recurrence, and a pool of 40 states."""
    key_heads, value_heads, key_dim, value_dim = shape
    keys, values = key_heads * key_dim, value_heads * value_dim
    q, k, v = (random(tokens, 2 * keys + values) / key_dim**0.5).split((keys, keys, values), 1)
    gates = [random(tokens, value_heads, seed=seed).sigmoid() for seed in (1, 2)]
    pool = random(40, 7 + values * key_dim)[:, 7:].unflatten(1, (value_heads, key_dim, value_dim))
    of_keys = key_heads, key_dim
    return [q.unflatten(1, of_keys), k.unflatten(1, of_keys), v.unflatten(1, (value_heads, value_dim)), *gates], pool


def in_chunks(tokens: int, sizes: int) -> list[tuple[int, int, StateRows]]:
    """(first token, end, the rows of the step) of a sequence in state 0, in chunks of so many tokens."""
    parts = [(first, min(tokens, first + sizes)) for first in range(0, tokens, sizes)]
    return [(first, end, rows_of([Given(end - first, 0 if first else -1, 0)])) for first, end in parts]


@each("is_delta", (True, False))
@each("lengths", ((1, 1, 5), (9, 2, 1, 17), (1,) * 8))
@each("shape", SHAPES)
def test_a_recurrence(shape: tuple[int, int, int, int], lengths: tuple[int, ...], is_delta: bool) -> None:
    given, matrices = recurrence_of(shape, sum(lengths))
    rows, expected = rows_of(every_kind(lengths)), matrices.clone()
    out = linear_recurrence.reference(*given, expected, rows, is_delta)
    assert_near(linear_recurrence.linear_recurrence(*given, matrices, rows, is_delta), out)
    assert_near(matrices, expected)


@each("is_delta", (True, False))
@each("shape", SHAPES)
def test_a_recurrence_has_the_same_bits_in_any_chunks(shape: tuple[int, int, int, int], is_delta: bool) -> None:
    given, matrices = recurrence_of(shape, TOKENS)
    whole = linear_recurrence.linear_recurrence(*given, matrices, rows_of([Given(TOKENS, -1, 1)]), is_delta)
    for size in (1, 5, 64):
        for first, end, rows in in_chunks(TOKENS, size):
            part = [x[first:end] for x in given]
            made = linear_recurrence.linear_recurrence(*part, matrices, rows, is_delta)
            assert torch.equal(made, whole[first:end]), f"chunks of {size}, from token {first} on"
        assert torch.equal(matrices[0], matrices[1])


@each("kind", [(True, False), (False, True)])
@each("lengths", ((1, 1, 5), (9, 2, 1, 17), (1,) * 8))
@each("shape", WINDOWS)
def test_a_convolution(shape: tuple[int, int], lengths: tuple[int, ...], kind: tuple[bool, bool]) -> None:
    (taps, channels), (has_bias, is_activated) = shape, kind
    u, weight = random(sum(lengths), channels + 3)[:, :channels], random(channels, taps)
    given = u, weight, random(channels) if has_bias else None
    windows = random(40, 5 + (taps - 1) * channels)[:, 5:].unflatten(1, (taps - 1, channels))
    rows, expected = rows_of(every_kind(lengths)), windows.clone()
    out = causal_convolution.reference(*given, expected, rows, is_activated)
    assert_near(causal_convolution.causal_convolution(*given, windows, rows, is_activated), out)
    assert torch.equal(windows, expected)


@each("shape", WINDOWS)
def test_a_convolution_has_the_same_bits_in_any_chunks(shape: tuple[int, int]) -> None:
    taps, channels = shape
    u, weight, bias = random(TOKENS, channels), random(channels, taps), random(channels)
    windows = torch.zeros(2, taps - 1, channels, device=DEVICE)
    whole = causal_convolution.causal_convolution(u, weight, bias, windows, rows_of([Given(TOKENS, -1, 1)]), True)
    for size in (1, 5, 64):
        for first, end, rows in in_chunks(TOKENS, size):
            made = causal_convolution.causal_convolution(u[first:end], weight, bias, windows, rows, True)
            assert torch.equal(made, whole[first:end]), f"chunks of {size}, from token {first} on"
        assert torch.equal(windows[0], windows[1])
