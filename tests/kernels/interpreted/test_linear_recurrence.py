"""The Triton kernel of a linear recurrence against its reference and a naive loop."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import linear_recurrence as kernel
from kernels.common.state_rows import StateRows
from tests.kernels.numbers import assert_near, random_tensor
from tests.kernels.state_steps import Given, chunks_of, every_kind, pool_of, rows_of


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    strength: Tensor

    def part(self, first: int, end: int) -> Inputs:
        return Inputs(*(x[first:end] for x in self))


def inputs_of(key_heads: int, value_heads: int, key_dim: int, value_dim: int, tokens: int, seed: int = 0) -> Inputs:
    """Queries, keys and values are parts of one tensor, as the convolution yields them."""
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed = random_tensor(tokens, 2 * keys + values, seed=seed) / key_dim**0.5
    q, k, v = mixed.split((keys, keys, values), 1)
    of_keys, of_values = (key_heads, key_dim), (value_heads, value_dim)
    decay, strength = random_tensor(2, tokens, value_heads, seed=seed).sigmoid()
    return Inputs(q.unflatten(1, of_keys), k.unflatten(1, of_keys), v.unflatten(1, of_values), decay, strength)


def naive(given: Inputs, matrices: Tensor, rows: StateRows, is_delta: bool) -> tuple[Tensor, Tensor]:
    """The outputs and the states, head by head in float64."""
    q, k, v, decay, strength = (x.double() for x in given)
    out, after = torch.empty_like(v), matrices.clone().double()
    per_key = v.shape[1] // k.shape[1]
    for row, (source, _, _) in enumerate(rows.numbers.tolist()):
        first, end = rows.starts[row : row + 2].tolist()
        for head in range(v.shape[1]):
            state = torch.zeros(matrices.shape[2:]).double() if source < 0 else matrices[source, head].double()
            for token in range(first, end):
                key, query = k[token, head // per_key], q[token, head // per_key]
                state = decay[token, head] * state
                change = v[token, head] - key @ state if is_delta else v[token, head]
                state = state + strength[token, head] * torch.outer(key, change)
                out[token, head] = query @ state
                for tokens, place in rows.writes_of(row):
                    if tokens == token - first + 1:
                        after[place, head] = state
    return out.float(), after.float()


@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("key_heads, value_heads, key_dim, value_dim, lengths", kernel.CASES)
def test_rows_of_every_kind_have_the_formulas_numbers_and_states(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, lengths: tuple[int, ...], is_delta: bool
) -> None:
    rows = rows_of(every_kind(lengths))
    matrices = pool_of(5 * len(lengths), value_heads, key_dim, value_dim)
    given = inputs_of(key_heads, value_heads, key_dim, value_dim, sum(lengths))
    expected, states = naive(given, matrices, rows, is_delta)
    of_reference, before = matrices.clone(), matrices.clone()
    assert_near(kernel.reference(*given, of_reference, rows, is_delta), expected)
    assert_near(of_reference, states)
    assert_near(kernel.linear_recurrence(*given, matrices, rows, is_delta), expected)
    assert_near(matrices, states)
    written = {state for row in range(len(lengths)) for _, state in rows.writes_of(row)}
    kept = [state for state in range(len(matrices)) if state not in written]
    assert torch.equal(matrices[kept], before[kept])


@pytest.mark.parametrize("cut", chunks_of(9), ids=str)
@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("sizes", [(2, 4, 24, 12), (1, 1, 200, 256)], ids=str)
def test_a_sequence_has_the_same_bits_however_it_is_cut(
    sizes: tuple[int, int, int, int], is_delta: bool, cut: list[int]
) -> None:
    given, other = inputs_of(*sizes, 9), inputs_of(*sizes, 2, seed=1)
    matrices = pool_of(5, *sizes[1:])
    beside = Inputs(*(torch.cat(both) for both in zip(other, given, strict=True)))
    rows = rows_of([Given(2, 2, 2), Given(9, -1, 3, saves=((cut[0], 4),) if cut[1:] else ())])
    expected = kernel.linear_recurrence(*beside, matrices, rows, is_delta)[2:]
    at, parts = 0, []
    for count in cut:
        row = Given(count, 0 if at else -1, 0)
        parts.append(kernel.linear_recurrence(*given.part(at, at + count), matrices, rows_of([row]), is_delta))
        assert at or not cut[1:] or torch.equal(matrices[0], matrices[4]), "a save is the state behind a chunk"
        at += count
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(matrices[0], matrices[3])


def test_drafts_leave_no_trace_in_the_target_and_a_beginning_reads_no_state() -> None:
    given, matrices = inputs_of(1, 2, 16, 16, 5), pool_of(2, 2, 16, 16)
    matrices.fill_(torch.nan)
    made = kernel.linear_recurrence(*given, matrices, rows_of([Given(5, -1, 0, drafts=3)]), True)
    kernel.linear_recurrence(*given.part(0, 2), matrices, rows_of([Given(2, -1, 1)]), True)
    assert not made.isnan().any()
    assert torch.equal(matrices[0], matrices[1])


def test_a_step_without_rows_yields_nothing() -> None:
    given, matrices = inputs_of(1, 2, 16, 16, 0), pool_of(1, 2, 16, 16)
    assert kernel.linear_recurrence(*given, matrices, rows_of([]), True).shape == (0, 2, 16)
