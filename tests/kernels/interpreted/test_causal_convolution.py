"""The Triton kernels of a causal convolution against its reference and a naive loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import causal_convolution as kernel
from kernels.common.state_rows import StateRows
from tests.kernels.numbers import assert_near, random_tensor
from tests.kernels.state_steps import Given, chunks_of, every_kind, pool_of, rows_of


def naive(
    u: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: StateRows, is_activated: bool
) -> tuple[Tensor, Tensor]:
    """The outputs and the states, number by number in float64."""
    taps, out, after = weight.shape[1], torch.empty_like(u).double(), windows.clone()
    for row, (source, _, _) in enumerate(rows.numbers.tolist()):
        first, end = rows.starts[row : row + 2].tolist()
        known = [torch.zeros(u.shape[1])] * (taps - 1) if source < 0 else list(windows[source].clone())
        for token in range(first, end):
            known.append(u[token])
            total = sum(known[len(known) - taps + tap].double() * weight[:, tap].double() for tap in range(taps))
            total = total if bias is None else total + bias.double()
            out[token] = total * torch.sigmoid(total) if is_activated else total
            for tokens, state in rows.writes_of(row):
                if tokens == token - first + 1 and taps > 1:
                    after[state] = torch.stack(known[1 - taps :])
    return out, after


def inputs_of(taps: int, channels: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """u within a wider tensor, weight, bias."""
    u = random_tensor(tokens, channels + 5)[:, 2 : 2 + channels]
    return u, random_tensor(channels, taps), random_tensor(channels)


@pytest.mark.parametrize("has_bias, is_activated", [(False, True), (True, False)])
@pytest.mark.parametrize("taps, channels, lengths", kernel.CASES)
def test_rows_of_every_kind_have_the_formulas_numbers_and_states(
    taps: int, channels: int, lengths: tuple[int, ...], has_bias: bool, is_activated: bool
) -> None:
    rows, windows = rows_of(every_kind(lengths)), pool_of(5 * len(lengths), taps - 1, channels)
    u, weight, bias = inputs_of(taps, channels, sum(lengths))
    given = (u, weight, bias if has_bias else None)
    expected, states = naive(*given, windows, rows, is_activated)
    of_reference, pool = windows.clone(), windows._base.clone()
    assert_near(kernel.reference(*given, of_reference, rows, is_activated), expected.float())
    assert_near(kernel.causal_convolution(*given, windows, rows, is_activated), expected.float())
    assert torch.equal(windows, states) and torch.equal(of_reference, states)
    size = (taps - 1) * channels
    assert torch.equal(windows._base[:, :7], pool[:, :7]), "the pool holds more than windows"
    assert torch.equal(windows._base[:, 7 + size :], pool[:, 7 + size :])


@pytest.mark.parametrize("cut", chunks_of(37), ids=str)
@pytest.mark.parametrize("taps", [2, 4])
def test_a_sequence_has_the_same_bits_however_it_is_cut(taps: int, cut: list[int]) -> None:
    channels, tokens = 140, 37
    u, weight, bias = inputs_of(taps, channels, tokens)
    u[3] = -0.0
    windows, other = pool_of(4, taps - 1, channels), random_tensor(5, channels)
    beside = torch.cat((other, u))
    rows = rows_of([Given(5, 2, 2), Given(tokens, -1, 3)])
    expected = kernel.causal_convolution(beside, weight, bias, windows, rows, True)[5:]
    at, parts = 0, []
    for count in cut:
        row = Given(count, 0 if at else -1, 0)
        parts.append(kernel.causal_convolution(u[at : at + count], weight, bias, windows, rows_of([row]), True))
        at += count
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(windows[0], windows[3])


def test_drafts_leave_no_trace_in_the_target_and_a_beginning_reads_no_state() -> None:
    u, weight, bias = inputs_of(4, 24, 5)
    windows = pool_of(2, 3, 24)
    windows.fill_(torch.nan)
    made = kernel.causal_convolution(u, weight, bias, windows, rows_of([Given(5, -1, 0, drafts=3)]), True)
    kernel.causal_convolution(u[:2], weight, bias, windows, rows_of([Given(2, -1, 1)]), True)
    assert not made.isnan().any()
    assert torch.equal(windows[0], windows[1])


def test_a_step_without_rows_yields_nothing() -> None:
    u, weight, bias = inputs_of(4, 24, 0)
    assert kernel.causal_convolution(u, weight, bias, pool_of(1, 3, 24), rows_of([]), True).shape == (0, 24)
