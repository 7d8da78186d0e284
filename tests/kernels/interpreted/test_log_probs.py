"""The log-probabilities' Triton kernels against their float64 reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import log_probs as kernel
from tests.kernels.numbers import assert_near, random_tensor

INF = torch.inf


def random_ids(rows: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(vocab))


def assert_like_the_reference(logits: Tensor, ids: Tensor, n: int) -> None:
    measured, expected = kernel.log_probs(logits, ids, n), kernel.reference(logits, ids, n)
    assert torch.equal(measured.top_ids, expected.top_ids) and measured.top_ids.dtype == torch.int64
    for values, wanted in ((measured.chosen, expected.chosen), (measured.top, expected.top)):
        assert values.dtype == torch.float32 and values.shape == wanted.shape
        finite = wanted > -INF
        assert torch.equal(values[~finite], wanted[~finite])
        if finite.any():
            assert_near(values[finite], wanted[finite])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])  # 16 bits: many equal logits
@pytest.mark.parametrize("rows, vocab, n", kernel.CASES)
def test_log_probs(rows: int, vocab: int, n: int, dtype: torch.dtype) -> None:
    assert_like_the_reference((5 * random_tensor(rows, vocab)).to(dtype), random_ids(rows, vocab), n)


@pytest.mark.parametrize("offset", [-1e6, -300.0, 300.0, 1e6])
def test_large_logits_neither_overflow_nor_lose_the_differences(offset: float) -> None:
    assert_like_the_reference(random_tensor(2, 5000) + offset, random_ids(2, 5000), 20)


def test_equal_logits_go_by_the_lower_id() -> None:
    logits = torch.full((3, 9000), -1.0)
    logits[1, [8999, 4096, 4095, 63, 64]] = 2.0  # on both sides of borders of groups and splits
    logits[2, ::7] = 0.0
    logits[2, 7::14] = -0.0
    top_ids = kernel.log_probs(logits, random_ids(3, 9000), 20).top_ids
    assert top_ids[0].tolist() == list(range(20))
    assert top_ids[1].tolist() == [63, 64, 4095, 4096, 8999, *range(15)]
    assert top_ids[2].tolist() == list(range(0, 140, 7))
    assert_like_the_reference(logits, random_ids(3, 9000), 20)


def test_the_most_likely_may_all_be_in_one_group_or_each_in_its_own() -> None:
    logits = random_tensor(2, 6000)
    logits[0, 4100:4120] += 20  # within the group that begins at 4096
    logits[1, 3::311] += 20
    assert_like_the_reference(logits, random_ids(2, 6000), 20)


def test_forbidden_tokens_have_no_probability() -> None:
    logits = torch.full((4, 5000), -INF)
    logits[0, [3, 4500]] = torch.tensor([1.0, 2.0])
    logits[1, 4999] = -7.0
    logits[3] = random_tensor(5000)
    logits[3, :4096] = -INF  # a whole split
    ids = torch.tensor([3, 5, 0, 4500])
    assert_like_the_reference(logits, ids, 20)
    measured = kernel.log_probs(logits, ids, 20)
    assert measured.chosen[1] == -INF and measured.top[1, 0] == 0
    assert measured.top_ids[0].tolist() == [4500, 3, 0, 1, 2, *range(4, 19)]
    assert (measured.top[2] == -INF).all() and measured.chosen[2] == -INF  # not NaN


def test_an_id_that_is_no_token_has_no_probability() -> None:
    assert kernel.log_probs(random_tensor(3, 40), torch.tensor([-1, 40, 2**40]), 0).chosen.tolist() == [-INF] * 3


@pytest.mark.parametrize(
    "shape, view", [((5, 130), lambda x: x[:, :70]), ((9, 70), lambda x: x[::2]), ((70, 4), torch.t)]
)
def test_logits_may_be_a_view(shape: tuple[int, int], view: Callable[[Tensor], Tensor]) -> None:
    logits = view(random_tensor(*shape))
    assert_like_the_reference(logits, random_ids(*logits.shape), 7)


def test_neighbours_do_not_change_a_row() -> None:
    logits, ids = random_tensor(3, 9000), random_ids(3, 9000)
    together = kernel.log_probs(logits, ids, 4)
    alone = kernel.log_probs(logits[1:2], ids[1:2], 4)
    assert all(torch.equal(a[1:2], b) for a, b in zip(together, alone))


def test_more_than_the_kernel_picks_come_from_the_reference() -> None:
    assert_like_the_reference(random_tensor(2, 100), random_ids(2, 100), kernel.MAX_TOP + 5)


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="18 most likely of 17"):
        kernel.log_probs(random_tensor(1, 17), random_ids(1, 17), 18)


@pytest.mark.parametrize("rows, vocab, n", kernel.CASES)
def test_the_reference_is_log_softmax(rows: int, vocab: int, n: int) -> None:
    logits, ids = random_tensor(rows, vocab), random_ids(rows, vocab)
    expected = torch.log_softmax(logits.double(), dim=1)
    chosen, top_ids, top = kernel.reference(logits, ids, n)
    assert_near(chosen, expected.gather(1, ids[:, None])[:, 0])
    if n:
        assert_near(top, expected.topk(n).values)
        assert_near(expected.gather(1, top_ids).float(), expected.topk(n).values)
