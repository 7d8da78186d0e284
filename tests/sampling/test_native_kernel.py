"""The native kernel against the torch reference: the same weights give the same token, and the weights are the right ones."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels import sampling as kernel
from kernels.cpu.sampling import FloatColumn, IntColumn, NativeSampling
from tests.sampling.native import KINDS, MIN_TEMPERATURE, Parameters, draw, draw_by_reference, logits_of

VOCABS = (1, 2, 17, 127, 128, 129, 1000, 4097, 50257, 128256)
CHI_SQUARE = {7: 24.32, 99: 148.23}  # upper 0.1 % points by degrees of freedom


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 1.7, 100.0])
@pytest.mark.parametrize("vocab", [17, 4097, 128256])
def test_weights_are_the_exact_ones_but_for_rounding(native: NativeSampling, vocab: int, temperature: float) -> None:
    for kind in ("normal", "zipf", "coarse", "masked"):
        logits = logits_of(kind, vocab, torch.Generator().manual_seed(vocab))
        scaled = (logits - logits.max()).double() / torch.tensor(temperature).double()
        exact = torch.softmax(scaled, dim=-1) * 2.0**kernel.WEIGHT_BITS
        error = (native.weights(logits, temperature).double() - exact).abs()
        assert float((error - exact * 2.0**-18).max()) <= 1.0


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_same_weights_give_the_token_of_the_reference(native: NativeSampling, vocab: int) -> None:
    rng = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    for kind in KINDS * (1 if vocab > 5000 else 4):
        rows = [random_parameters(rng, vocab) for _ in range(8 if vocab > 5000 else 24)]
        logits = torch.stack([logits_of(kind, vocab, generator) for _ in rows])
        expected = [draw_by_reference(native.weights(logits[i], row.temperature), row) for i, row in enumerate(rows)]
        assert draw(native, logits, rows) == expected


def random_parameters(rng: random.Random, vocab: int) -> Parameters:
    """Each filter is off half the time."""
    return Parameters(
        temperature=rng.choice([MIN_TEMPERATURE, 1e-3, 0.3, 0.8, 1.0, 1.7, 100.0, 1e30]),
        top_k=min(vocab, rng.choice([0, 0, 0, 1, 2, 50, 1023, 1025, vocab, max(1, vocab - 1)])),
        top_p=rng.choice([1.0, 1.0, 1.0, 1e-12, 0.1, 0.5, 0.9, 1 - 1e-9]),
        min_p=rng.choice([0.0, 0.0, 0.0, 1e-13, 1e-6, 0.05, 0.5, 1.0]),
        seed=rng.randrange(-(2**63), 2**63),
        counter=rng.randrange(10**6),
    )


@pytest.mark.parametrize("case", kernel.CASES)
def test_the_kernel_chooses_what_the_reference_chooses_from_logits(
    native: NativeSampling, case: tuple[int, int, int, float, float, float]
) -> None:
    """Of these fixed draws none falls where the two exponential functions round to different sides of a boundary."""
    rows, vocab, top_k, top_p, min_p, temperature = case
    generator = torch.Generator().manual_seed(rows * vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    parameters = [Parameters(temperature, top_k, top_p, min_p, seed, rows) for seed in range(rows)]
    u = kernel.uniform(torch.arange(rows), torch.full((rows,), rows))
    k = top_k or vocab
    fill = lambda value: torch.full((rows,), value, dtype=torch.float64)
    filters = (torch.full((rows,), k), fill(top_p), fill(min_p)) if k < vocab or top_p < 1 or min_p > 0 else None
    expected = kernel.sample(logits.clone(), fill(temperature).float(), u, filters, k)
    assert draw(native, logits, parameters) == expected.tolist()


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({}, 8), ({"temperature": 2.0}, 8), ({"top_k": 4}, 4), ({"top_p": 0.945}, 6), ({"min_p": 0.2}, 6)],
)
def test_many_draws_follow_the_distribution(native: NativeSampling, filters: dict[str, float], kept: int) -> None:
    probabilities = torch.tensor([0.30, 0.22, 0.16, 0.12, 0.08, 0.07, 0.03, 0.02], dtype=torch.float64)
    num = 20000
    drawn = draw_many(native, probabilities.log().float(), num, seed=17, **filters)
    expected = probabilities ** (1 / filters.get("temperature", 1.0))
    expected[kept:] = 0
    expected = num * expected / expected.sum()
    counts = torch.bincount(drawn, minlength=8).double()
    assert counts[kept:].sum() == 0
    assert float(((counts - expected)[:kept] ** 2 / expected[:kept]).sum()) < CHI_SQUARE[7]


def test_draws_from_a_large_vocabulary_follow_the_distribution(native: NativeSampling) -> None:
    """A hundred shares of neighbouring tokens, of different sizes."""
    logits = logits_of("normal", 32000, torch.Generator().manual_seed(1))
    num = 20000
    drawn = draw_many(native, logits, num, seed=5)
    expected = num * torch.softmax(logits.double(), -1).view(100, -1).sum(1)
    counts = torch.bincount(drawn // 320, minlength=100).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE[99]


def draw_many(native: NativeSampling, logits: torch.Tensor, num: int, **fields: float) -> torch.Tensor:
    """Tokens [num] from one row of logits, by successive counters."""
    rows = [Parameters(counter=counter, **fields) for counter in range(num)]
    return torch.tensor(draw(native, logits.expand(num, -1), rows))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_nan_among_the_logits_is_never_chosen_while_a_finite_one_is_left(
    native: NativeSampling, top_p: float
) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
    logits[0, ::2] = torch.nan
    rows = [Parameters(top_p=top_p, counter=counter) for counter in range(200)]
    assert all(token % 2 == 1 for token in draw(native, logits.expand(200, -1), rows))
    assert draw(native, torch.full((1, 300), torch.nan), rows[:1]) == [299]


def test_rows_slots_and_lengths_that_there_are_not_are_refused(native: NativeSampling) -> None:
    logits, token_ids = torch.zeros(2, 50), torch.zeros(3, 4, dtype=torch.int64)
    tables = torch.zeros(3, len(FloatColumn), dtype=torch.float64), torch.zeros(3, len(IntColumn), dtype=torch.int64)
    sample = np.zeros((3, 1), dtype=np.int64)
    for row, slot, known in ((2, 0, 1), (-1, 0, 1), (0, 3, 1), (0, -1, 1), (0, 0, -1)):
        with pytest.raises(
            ValueError, match=f"row {row}, slot {slot} and {known} tokens; there are 2 rows and 3 slots"
        ):
            native.sample(logits, np.array([[row], [slot], [known]]), *tables, token_ids)
    with pytest.raises(ValueError, match="float64 on cpu"):
        native.sample(logits.double(), sample, *tables, token_ids)
    with pytest.raises(ValueError, match="contiguous rows"):
        native.sample(logits.t(), sample, *tables, token_ids)
