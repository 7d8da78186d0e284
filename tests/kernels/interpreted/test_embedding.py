"""The embedding's Triton kernel against its reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import embedding as kernel
from tests.kernels.numbers import DTYPES, assert_near, random_tensor


def random_ids(tokens: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, vocab, hidden", kernel.CASES)
def test_rows_are_copied_bit_for_bit(tokens: int, vocab: int, hidden: int, dtype: torch.dtype) -> None:
    table, ids = random_tensor(vocab, hidden, dtype=dtype), random_ids(tokens, vocab)
    assert torch.equal(kernel.embedding(table, ids), F.embedding(ids, table))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, vocab, hidden", [case for case in kernel.CASES if case[0]])
def test_rows_are_scaled(tokens: int, vocab: int, hidden: int, dtype: torch.dtype) -> None:
    table, ids = random_tensor(vocab, hidden, dtype=dtype), random_ids(tokens, vocab)
    y = kernel.embedding(table, ids, scale=hidden**0.5)
    assert y.dtype == dtype
    assert_near(y, F.embedding(ids, table.float()) * hidden**0.5)


@pytest.mark.parametrize("scale", [None, 1.5])
def test_ids_outside_the_table_give_zeros(scale: float | None) -> None:
    table = random_tensor(10, 48) + torch.inf  # 0 times a wrong row would be seen
    table[[0, 9]] = random_tensor(2, 48)
    ids = torch.tensor([-1, 0, 9, 10, 2**31, 2**32, -(2**63), 2**63 - 1])
    y = kernel.embedding(table, ids, scale)
    assert torch.equal(y, kernel.reference(table, ids, scale))
    assert y[1:3].all() and not y[0].any() and not y[3:].any()


def test_the_shards_of_a_table_add_up_to_its_embedding() -> None:
    table, ids = random_tensor(25, 40), random_ids(12, 25)
    parts = [kernel.embedding(table[first : first + 7], ids, first=first) for first in range(0, 25, 7)]
    assert torch.equal(sum(parts), F.embedding(ids, table))
    assert all(not part.all() for part in parts)


def test_the_reference_is_torch_embedding() -> None:
    table, ids = random_tensor(25, 40), random_ids(12, 25)
    assert torch.equal(kernel.reference(table, ids), F.embedding(ids, table))
    assert torch.equal(kernel.reference(table[5:], ids + 3, first=8), F.embedding(ids, table) * (ids >= 5)[:, None])
