"""What the quality benchmark measures."""

from __future__ import annotations

import math

import pytest
import torch

from backend.models.loader import DEFAULT_MODEL, load_directory
from benchmarks.quality.perplexity import compare, held_out_rows, row_logits


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
