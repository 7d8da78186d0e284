"""Each kernel against its formula, written as naive loops in float64, on its own CASES."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import activation, norm, paged_attention, rope
from kernels.common.kv_format import plain_pool
from tests.kernels.numbers import random_tensor

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative to 1 + |expected|
DTYPES = list(TOLERANCE)
NEVER_WRITTEN = math.nan


def assert_near(measured: Tensor, expected: Tensor) -> None:
    assert measured.shape == expected.shape
    error = ((measured.double() - expected).abs() / (1 + expected.abs())).max().item()
    assert error <= TOLERANCE[measured.dtype], f"error {error:.1e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", norm.CASES)
def test_rms_norm_follows_its_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random_tensor(*shape, dtype=dtype), random_tensor(shape[-1], dtype=dtype)
    measured = norm.norm(x, weight, 1e-3)
    expected = torch.empty(shape, dtype=torch.float64)
    for index in np.ndindex(*shape[:-1]):
        row = x[index].double()
        mean_square = sum(value * value for value in row.tolist()) / len(row)
        expected[index] = row / math.sqrt(mean_square + 1e-3) * weight.double()
    assert_near(measured, expected)
    assert measured.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens, heads, head_dim", rope.CASES)
def test_rope_rotates_each_pair_by_its_angle(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    half = head_dim // 2
    x = random_tensor(num_tokens, heads, head_dim, dtype=dtype)
    angles = random_tensor(num_tokens, half, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = torch.empty(x.shape, dtype=torch.float64)
    for token, head, pair in np.ndindex(num_tokens, heads, half):
        a, b = x[token, head, pair].double(), x[token, head, pair + half].double()
        c, s = cos[token, pair].double(), sin[token, pair].double()
        expected[token, head, pair], expected[token, head, pair + half] = a * c - b * s, b * c + a * s
    assert_near(rope.reference(x, *rope.rope_factors(cos, sin)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", activation.CASES)
def test_silu_mul_gates_the_second_half_by_the_first(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random_tensor(*shape, dtype=dtype)
    half = shape[-1] // 2
    gate, up = x[..., :half].double(), x[..., half:].double()
    assert_near(activation.activate(x), gate / (1 + torch.exp(-gate)) * up)


class Scene:
    """A pool with the KV of one batch at random places; everything that must not be read is NaN."""

    def __init__(self, case: paged_attention.PagedCase) -> None:
        self.case = case
        lengths = [length for _, length in case.rows]
        sizes = [-(-length // case.block_size) for length in lengths]
        order = np.random.default_rng(0).permutation(sum(sizes) + 3)
        self.pool = torch.full(
            (len(order), case.block_size, 2, case.kv_heads, case.head_dim), NEVER_WRITTEN, dtype=case.dtype
        )
        tables = np.full((len(lengths), max(sizes)), -1, dtype=np.int32)
        self.kv = [
            random_tensor(length, 2, case.kv_heads, case.head_dim, dtype=case.dtype, seed=row)
            for row, length in enumerate(lengths)
        ]
        for row, size in enumerate(sizes):
            tables[row, :size] = order[sum(sizes[:row]) :][:size]
            self._fill(row, tables[row])
        queries = [count for count, _ in case.rows]
        starts = np.concatenate(([0], np.cumsum(queries)))
        self.rows = paged_attention.AttentionRows(starts, np.array(lengths), tables)
        self.q = random_tensor(sum(queries), case.kv_heads * case.group, case.head_dim, dtype=case.dtype, seed=99)

    def visible(self, position: int, length: int) -> list[int]:
        """The keys before `length` that the query at `position`, or a later one, may see."""
        window = length if self.case.window is None else self.case.window
        return [key for key in range(length) if key > position - window or key < self.case.sink_tokens]

    def _fill(self, row: int, table: np.ndarray) -> None:
        queries, length = self.case.rows[row]
        visible, size = self.visible(length - queries, length), self.case.block_size
        for position in visible:
            self.pool[table[position // size], position % size] = self.kv[row][position]
        unused = set(range(len(table))) - {position // size for position in visible}
        table[list(unused)] = -1

    def attend(self) -> Tensor:
        case, cpu = self.case, torch.device("cpu")
        (plan,) = paged_attention.plan_attention(
            self.rows, case.block_size, [case.window], case.head_dim, case.dtype, cpu, sink_tokens=case.sink_tokens
        ).values()
        return paged_attention.paged_attention(self.q, plain_pool(self.pool), plan)

    def expected(self) -> Tensor:
        case = self.case
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for row, (queries, length) in enumerate(case.rows):
            for query in range(queries):
                token, position = int(self.rows.starts[row]) + query, length - queries + query
                seen = self.visible(position, position + 1)
                for head in range(case.kv_heads * case.group):
                    keys, values = self.kv[row][seen][:, :, head // case.group].double().unbind(1)
                    scores = keys @ self.q[token, head].double() / math.sqrt(case.head_dim)
                    weights = torch.exp(scores - scores.max())
                    out[token, head] = weights / weights.sum() @ values
        return out


@pytest.mark.feature("004-19", "004-20", "001-29", "001-30")
@pytest.mark.parametrize("case", paged_attention.CASES, ids=str)
def test_paged_attention_follows_its_formula_and_reads_nothing_else(case: paged_attention.PagedCase) -> None:
    scene = Scene(case)
    assert scene.pool.isnan().any()
    assert_near(scene.attend(), scene.expected())


@pytest.mark.parametrize("rows", [[(1, 9), (1, 7)], [(3, 9), (1, 7)]])
def test_a_table_entry_inside_the_window_that_was_let_go_is_an_error(rows: list[tuple[int, int]]) -> None:
    scene = Scene(paged_attention.PagedCase(rows))
    scene.rows.tables[0, 1] = -1
    with pytest.raises(IndexError):
        scene.attend()


def test_rows_of_very_different_length_are_not_padded_to_the_longest() -> None:
    rows = [(1, 4)] * 30 + [(1, 4000)]
    scene = Scene(paged_attention.PagedCase(rows))
    plan = paged_attention.plan_attention(scene.rows, 4, [None], 16, torch.float32, torch.device("cpu"))[None]
    gathered = sum(len(group.blocks) for group in plan.generation)
    assert gathered == 30 + 1000
