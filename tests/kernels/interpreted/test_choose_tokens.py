"""The choice's Triton kernels: the same tokens as their reference, whose choice is that of kernels/sampling.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import choose_tokens as kernel
from kernels import sampling
from tests.kernels.numbers import random_tensor

DTYPES = [torch.float32, torch.bfloat16]
FILTERS = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.02), (40, 0.8, 0.01), (3, 0.05, 0.9), (0, 0.0, 0.0)]


def asked(
    rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 0.8, seed: int = 0
) -> kernel.SamplingRows:
    seeds = torch.randint(-(2**63), 2**63 - 1, (2, rows), generator=torch.Generator().manual_seed(seed))
    doubles = [torch.full((rows,), value, dtype=torch.float64) for value in (top_p, min_p)]
    return kernel.SamplingRows(torch.full((rows,), temperature), torch.full((rows,), top_k), *doubles, *seeds)


def mixed(rows: int, seed: int = 0) -> kernel.SamplingRows:
    """Every row with parameters of its own: greedy ones, without filters, with some."""
    made = asked(rows, seed=seed)
    for row in range(rows):
        top_k, top_p, min_p = FILTERS[row % len(FILTERS)]
        made.top_k[row], made.top_p[row], made.min_p[row] = top_k, top_p, min_p
        made.temperature[row] = (0.7, 0.0, 1.5)[row // len(FILTERS) % 3]
    made.top_k[-1] = 1
    return made


def penalties(rows: int, vocab: int, length: int = 1100) -> kernel.Penalties:
    generator = torch.Generator().manual_seed(rows + vocab)
    tokens = torch.randint(0, min(vocab, 700), (rows + 2, length), generator=generator)
    known = torch.randint(1, length + 1, (rows,), generator=generator)
    prompt = (known * torch.rand(rows, generator=generator)).long()
    factors = [torch.rand(rows, generator=generator) + low for low in (0.8, -0.5, -0.2)]
    return kernel.Penalties(tokens, torch.randperm(rows + 2, generator=generator)[:rows], prompt, known, *factors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", kernel.CASES)
@pytest.mark.parametrize("filters", FILTERS)
def test_every_filter_leaves_the_references_token(
    filters: tuple[int, float, float], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    logits, rows = (3 * random_tensor(*shape)).to(dtype), asked(shape[0], *filters)
    assert torch.equal(kernel.choose_tokens(logits, rows), kernel.reference(logits, rows))


def test_rows_of_all_kinds_stand_in_one_batch() -> None:
    logits, rows = 3 * random_tensor(22, 3000), mixed(22)
    assert torch.equal(kernel.choose_tokens(logits, rows), kernel.reference(logits, rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", kernel.CASES)
def test_penalties_and_a_mask_come_first(shape: tuple[int, int], dtype: torch.dtype) -> None:
    count, vocab = shape
    logits, rows, of = (3 * random_tensor(*shape)).to(dtype), mixed(count), penalties(*shape)
    mask = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), generator=torch.Generator().manual_seed(1)).int()
    mask[0] = 0
    mask[0, 0] = 1 << 3  # one token is allowed
    measured = kernel.choose_tokens(logits, rows, of, mask)
    assert torch.equal(measured, kernel.reference(logits, rows, of, mask))
    assert measured[0] == 3
    greedy = rows._replace(temperature=torch.zeros(count))  # the greatest logit shows a wrong penalty at once
    assert torch.equal(kernel.choose_tokens(logits, greedy, of), kernel.changed(logits, of).argmax(1))


@pytest.mark.parametrize("filters", FILTERS)
def test_equal_logits_fall_in_the_order_of_their_ids(filters: tuple[int, float, float]) -> None:
    logits, rows = random_tensor(2, 1500).mul(2).round(), asked(2, *filters)
    assert torch.equal(kernel.choose_tokens(logits, rows), kernel.reference(logits, rows))
    flat = torch.zeros(2, 1500)  # with a filter every token is listed: more than a tile
    assert torch.equal(kernel.choose_tokens(flat, rows), kernel.reference(flat, rows))


@pytest.mark.parametrize(
    "filters", [(90, 1.0, 0.0), (90, 0.6, 1e-3), (4000, 0.9, 0.0), (0, 0.999, 1e-9), (0, 0.5, 0.9)]
)
def test_k_beyond_the_groups_and_floors_of_two_filters(filters: tuple[int, float, float]) -> None:
    logits, rows = 4 * random_tensor(2, 5000), asked(2, *filters, temperature=1.0)
    assert torch.equal(kernel.choose_tokens(logits, rows), kernel.reference(logits, rows))


def test_a_few_heavy_tokens_are_found_among_many_light_ones() -> None:
    """A list without the tokens that the nucleus ends in would move its end."""
    logits = torch.cat([torch.full((3, 4000), -12.0), torch.tensor([0.0, -0.5, -1.0, -6.0]).expand(3, 4)], 1)
    for top_p in (0.5, 0.96, 0.9999):
        rows = asked(3, 0, top_p, temperature=1.0, seed=7)
        assert torch.equal(kernel.choose_tokens(logits, rows), kernel.reference(logits, rows))


def test_rows_without_a_finite_greatest_logit_and_numbers_that_are_none() -> None:
    logits, rows = random_tensor(5, 1100), asked(5, 7, 0.9)
    logits[0] = -torch.inf
    logits[1, 4] = torch.inf
    logits[2, ::2] = torch.nan
    logits[3] = torch.nan
    logits[4, 1:] = -torch.inf
    chosen = kernel.choose_tokens(logits, rows).tolist()
    assert chosen[0] == chosen[1] == chosen[3] == 1099 and chosen[2] % 2 == 1 and chosen[4] == 0
    greedy = rows._replace(temperature=torch.zeros(5))
    assert kernel.choose_tokens(logits, greedy).tolist()[:2] == [0, 4]


@pytest.mark.parametrize("temperature", [1e-30, 0.01, 50.0])
def test_any_temperature(temperature: float) -> None:
    logits, rows = random_tensor(4, 1100), asked(4, temperature=temperature)
    assert torch.equal(kernel.choose_tokens(logits, rows), kernel.reference(logits, rows))


def test_weights_are_near_the_true_exponentials_and_never_fall() -> None:
    x = torch.cat([-torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 30, torch.zeros(1)])
    near = torch.arange(1, 40).double()[:, None] * -math.log(2) + torch.arange(-9, 10) * 2.0**-21  # n changes here
    x = torch.cat([x, near.flatten().float()]).sort().values
    weights = kernel.weights_of(x[None], torch.ones(1))[0]
    exact = torch.exp(x.double()) * 2.0**40
    assert ((weights - exact).abs() <= 1 + exact * 2.0**-27).all()
    assert (weights.diff() >= 0).all() and weights[-1] == 2**40


def test_the_choice_is_that_of_sampling_save_where_rounding_decides() -> None:
    """Rows whose tokens differ from sampling.sample's are few, and a change of u, p or the weights within SLACK explains each."""
    count, vocab, differing, explained = 1000, 2000, 0, 0
    for seed, (top_k, top_p, min_p) in enumerate(FILTERS):
        logits = 3 * random_tensor(count, vocab, seed=seed)
        rows = asked(count, top_k, top_p, min_p, seed=seed)
        u = sampling.uniform(rows.seed, rows.counter)
        filters = (
            (torch.full((count,), top_k or vocab), rows.top_p, rows.min_p)
            if (top_k, top_p, min_p) != FILTERS[0]
            else None
        )
        expected = sampling.sample(logits, rows.temperature, u, filters, vocab)
        wrong = (kernel.reference(logits, rows) != expected).nonzero()[:, 0]
        differing += len(wrong)
        for row in wrong:
            explained += near_a_boundary(
                logits[row], rows.temperature[row], u[row], filters is not None, top_k, top_p, min_p
            )
    print(f"{differing} of {count * len(FILTERS)} rows differ")
    assert differing == explained and differing <= count * len(FILTERS) * 1e-3


def near_a_boundary(
    logits: Tensor, temperature: Tensor, u: Tensor, filtered: bool, top_k: int, top_p: float, min_p: float
) -> bool:
    """Whether in float64 the target, or an end of a filter, lies within SLACK of where one token ends and the next begins."""
    p = torch.softmax((logits.double() - logits.max()) / temperature, 0)
    ranked = p.sort(descending=True).values if filtered else p
    kept = ranked[: top_k or None]
    running = kept.cumsum(0) / kept.sum()
    ends = [] if top_p >= 1 else [(running - top_p).abs().min().item()]
    ends += [] if min_p <= 0 else [(ranked / ranked[0] / min_p - 1).abs().min().item()]
    keep = (running - kept / kept.sum() < top_p) & (kept >= min_p * kept[0])
    left = kept[keep].cumsum(0)
    ends.append((left / left[-1] - u).abs().min().item()) if len(left) else None
    ends += [] if not filtered else [((ranked[:-1] - ranked[1:]) / ranked[1:])[: len(kept)].min().item()]
    return min(ends) <= kernel.SLACK
