"""Weights that are rounded to blocks (native/rounding.cpp) against their reference, and what the blocks then compute."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from backend.layers.linear import QuantizedWeight, make_torch_linear
from backend.worker.native_tier import PackLinears
from kernels.common import super_blocks
from kernels.common.rounding import (
    GROUP,
    ROUNDED,
    VALUES,
    Round,
    Rounded,
    bits_of,
    floats,
    form_of,
    in_blocks,
    indices,
    round_weight,
)
from kernels.cpu.linear import RoundToBlocks
from tests.native.test_linear import as_the_kernels_quantise, assert_product, random_tensor

# name -> the error of normal numbers, relative, as the search of the reference leaves it; without one 0.077 and 0.0372
ERRORS = {"w4a8": (0.0725, 0.0741), "w6a8": (0.0331, 0.0343)}
named = pytest.mark.parametrize("name", ROUNDED)


def held(rounded: Rounded, name: str) -> QuantizedWeight:
    return QuantizedWeight(rounded.q, rounded.scale, GROUP, name, minimum=rounded.minimum)  # type: ignore[arg-type]


def error(w: Tensor, rounded: Rounded, importance: Tensor | None = None) -> float:
    """Relative, by how much columns count."""
    counts = torch.ones(w.shape[1]) if importance is None else importance
    square = lambda x: (x.square() * counts).sum()
    return (square(floats(rounded) - w) / square(w)).sqrt().item()


def of_bits(w: Tensor, rounded: Round, name: str) -> float:
    return error(w, rounded(w, name, None))


@named
def test_a_rounded_weight_is_packed_as_the_numbers_that_it_stands_for(kernels: CDLL, isa: str, name: str) -> None:
    rng = torch.Generator().manual_seed(8)
    for k in (100, 512):
        x, w = random_tensor(rng, 7, k), random_tensor(rng, 64, k) + 0.3
        rounded = round_weight(w, name)
        layer = PackLinears(kernels)(held(rounded, name), None)
        values = as_the_kernels_quantise(kernels, x, GROUP)
        assert_product(layer(x), values, floats(rounded).double(), None, (isa, k))
        assert layer.num_bytes == 64 * -(-k // 64) * 64 * bits_of(name) / 8


@named
def test_torch_multiplies_by_the_same_numbers(name: str) -> None:
    rng = torch.Generator().manual_seed(13)
    x, rounded = random_tensor(rng, 5, 70), round_weight(random_tensor(rng, 40, 70) - 0.4, name)
    layer = make_torch_linear(held(rounded, name), None)
    assert layer.num_bytes == 40 * 70 + 40 * 3 * 4 * (1 if rounded.minimum is None else 2)
    step = x.abs().amax() / 127
    assert (layer(x) - x @ floats(rounded).T).abs().max() < step * floats(rounded).abs().sum(1).max() / 2


@named
def test_blocks_stand_for_the_same_numbers(name: str) -> None:
    """A minimum that belongs to the group beside it would show: each group has a mean of its own."""
    w = random_tensor(torch.Generator().manual_seed(14), 20, 100) + torch.arange(100) // GROUP
    rounded = round_weight(w, name)
    blocks = in_blocks(rounded, name)
    assert blocks.kind == ROUNDED[name] and blocks.q.shape == (20, 128)
    assert torch.equal(super_blocks.floats(blocks)[:, :100], floats(rounded))


@named
@pytest.mark.parametrize("is_weighted", [True, False])
def test_native_rounding_is_as_good_as_its_reference(kernels: CDLL, isa: str, is_weighted: bool, name: str) -> None:
    """Sums go in another order, so that another of two equally good scales may be taken."""
    rng = torch.Generator().manual_seed(9)
    for n, k in ((50, 256), (3, 100), (1, 1), (20, 300)):
        w, importance = random_tensor(rng, n, k), torch.rand(k, generator=rng) ** 4 + 1e-6 if is_weighted else None
        w[:, ::2] += 0.5
        w[0, :] = 0
        errors = []
        for rounded in (RoundToBlocks(kernels)(w, name, importance), round_weight(w, name, importance)):
            form = form_of(name)
            assert set(rounded.q.unique().tolist()) <= set(VALUES if form.values else range(2**form.bits))
            for table in rounded[1:]:
                assert table is None or (
                    table.shape == (n, -(-k // GROUP)) and torch.equal(table, table.half().float())
                )
            assert (rounded.minimum is not None) == form.has_minima
            errors.append(error(w, rounded, importance))
        assert errors[0] <= 1.002 * errors[1] or n == 1


@named
def test_inputs_that_count_more_are_rounded_better(best_kernels: CDLL, name: str) -> None:
    """Every eighth column counts a thousand times as much; a wrong column's importance would spoil it."""
    rng = torch.Generator().manual_seed(12)
    w, importance = random_tensor(rng, 200, 256), torch.ones(256)
    importance[::8] = 1000
    for rounded in (RoundToBlocks(best_kernels), round_weight):
        errors = [(floats(rounded(w, name, given)) - w)[:, ::8].norm() for given in (importance, None)]
        assert errors[0] < 0.75 * errors[1]


@named
def test_a_rounded_weight_s_error_is_what_the_search_promises(best_kernels: CDLL, name: str) -> None:
    w = random_tensor(torch.Generator().manual_seed(10), 400, 512)
    least, most = ERRORS[name]
    assert least < of_bits(w, RoundToBlocks(best_kernels), name) < most
    assert least < of_bits(w[:100, :256], round_weight, name) < most


def test_numbers_that_are_not_around_zero_lose_nothing_where_there_are_minima(best_kernels: CDLL) -> None:
    w = random_tensor(torch.Generator().manual_seed(15), 50, 256)
    for rounded in (RoundToBlocks(best_kernels), round_weight):
        moved = floats(rounded(w + 1, "w6a8", None)) - 1
        assert (moved - w).norm() / w.norm() < 1.02 * of_bits(w, rounded, "w6a8")


@named
def test_groups_of_one_number_are_kept(best_kernels: CDLL, name: str) -> None:
    """Zeros by both forms, any number that float16 holds where there are minima."""
    number = 0.0 if form_of(name).values else -0.75
    for rounded in (RoundToBlocks(best_kernels), round_weight):
        assert torch.equal(floats(rounded(torch.full((3, 64), number), name, None)), torch.full((3, 64), number))


def test_the_places_of_values_are_found() -> None:
    q = torch.tensor([VALUES, VALUES[::-1]], dtype=torch.int8)
    assert indices(q).tolist() == [list(range(16)), list(range(15, -1, -1))]


def test_names_say_how_many_bits_a_weight_has() -> None:
    assert {name: int(bits_of(name)) for name in ROUNDED} == {name: int(name[1]) for name in ROUNDED}
