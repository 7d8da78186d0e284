"""The benchmark's own pieces: the peers' formats against their definitions, and what is measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.models.loader import DEFAULT_MODEL, load_directory
from benchmarks.quality.eight_bits import (
    Q8_0,
    Measured,
    asymmetric_rows,
    compare,
    formats,
    held_out_rows,
    no_worse,
    q8_0,
    row_logits,
)


def random_values(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


def naive_q8_0(block: list[float]) -> list[float]:
    """One block, as ggml-quants.c has it: float32 arithmetic, roundf, a float16 scale."""
    d = np.float32(max(abs(value) for value in block)) / np.float32(127)
    scale = np.float32(np.float16(d))
    out = []
    for value in block:
        ratio = np.float32(value) / d if d else np.float32(0)
        out.append(float(np.float32(math.copysign(math.floor(abs(float(ratio)) + 0.5), ratio)) * scale))
    return out


@pytest.mark.parametrize("rows, columns", [(1, 32), (5, 96), (3, 320)])
def test_q8_0_follows_its_published_format(rows: int, columns: int) -> None:
    x = random_values(rows, columns)
    x[0, :32] = 0
    expected = [[v for part in row.split(32) for v in naive_q8_0(part.tolist())] for row in x]
    assert q8_0(x).tolist() == expected


def test_q8_0_needs_whole_blocks() -> None:
    with pytest.raises(ValueError, match="48 columns, q8_0 needs a multiple of 32"):
        q8_0(torch.zeros(1, 48))


def test_asymmetric_rows_span_least_to_greatest_in_255_steps() -> None:
    w = random_values(7, 50) + 0.7
    w[0], w[1] = w[0].abs(), 0
    kept = asymmetric_rows(w)
    step = (w.amax(1).clamp(min=0) - w.amin(1).clamp(max=0)) / 255
    assert ((kept - w).abs().amax(1) <= 1.0001 * step).all()  # half a step, and half of the rounded zero point's
    assert all(len(row.unique()) <= 256 for row in kept)
    assert kept[1].abs().sum() == 0


def test_the_held_out_text_is_cut_into_rows_from_all_of_it() -> None:
    few, many = held_out_rows(1024), held_out_rows(8192)
    assert (few.shape, many.shape) == ((2, 512), (16, 512))
    assert torch.equal(few[0], many[0])
    assert not torch.equal(few[1], many[1])


def test_logits_of_rows_are_those_of_each_alone() -> None:
    model = load_directory(DEFAULT_MODEL, None, "float32", torch.device("cpu"))
    rows = held_out_rows(1024)[:, :70]
    together = row_logits(model, rows)
    for row, logits in zip(rows, together):
        torch.testing.assert_close(row_logits(model, row[None])[0], logits, rtol=0, atol=1e-4)


def test_logits_compared_with_themselves_have_no_error_and_their_own_perplexity() -> None:
    model = load_directory(DEFAULT_MODEL, None, "float32", torch.device("cpu"))
    rows = held_out_rows(512)
    logits = row_logits(model, rows)
    measured = compare([logits], [logits], rows, is_text=True)
    assert (measured.error, measured.divergence) == (0.0, 0.0)
    chances = [logits[0, i].softmax(0)[rows[0, i + 1]].item() for i in range(511)]
    assert measured.perplexity == pytest.approx(math.exp(-sum(map(math.log, chances)) / 511), rel=1e-4)


def test_an_error_is_relative_to_the_logits() -> None:
    model = load_directory(DEFAULT_MODEL, None, "float32", torch.device("cpu"))
    rows = held_out_rows(512)
    logits = row_logits(model, rows)
    measured = compare([2 * logits], [logits], rows, is_text=False)
    assert measured.error == pytest.approx(0.5, rel=1e-5)
    assert measured.divergence > 0
    assert measured.perplexity is None


def test_a_format_has_to_hold_on_every_model() -> None:
    results = {
        "a": {Q8_0: Measured(0.10, 0.1, None), "x": Measured(0.09, 0.1, None), "y": Measured(0.101, 0.1, None)},
        "b": {Q8_0: Measured(0.20, 0.1, None), "x": Measured(0.25, 0.1, None), "y": Measured(0.100, 0.1, None)},
    }
    assert (no_worse(results, "x"), no_worse(results, "y")) == (False, True)


def test_the_reference_comes_first_and_names_are_unique() -> None:
    names = [format.name for format in formats()]
    assert names[0] == "float32"
    assert len(set(names)) == len(names)
    assert Q8_0 in names
