"""Hidden states of the native step: the norm's rows of those tokens that yield logits, and only in a step that wants them."""

from __future__ import annotations

from ctypes import CDLL

import numpy as np
import pytest
import torch

from kernels.cpu.decoder import NativeDecoder
from tests.native.test_screen import MAX_LEN, SLOTS, Model, random_head


class Stepper:
    """Runs steps of new sequences on one decoder."""

    def __init__(self, library: CDLL, dtype: torch.dtype) -> None:
        self.model = Model(library, random_head(96, 64, dtype))
        self.decoder: NativeDecoder = self.model.decoder(None)
        self._ids = (torch.arange(SLOTS * MAX_LEN).view(SLOTS, MAX_LEN) * 7) % 96
        self._tables = np.arange(SLOTS, dtype=np.int32)[:, None]
        self._pool = torch.zeros(SLOTS, self.decoder.kv_block_bytes, dtype=torch.uint8)

    def run(self, rows: list[list[int]], hidden: torch.Tensor | None) -> torch.Tensor:
        numbers = np.array(rows, dtype=np.int32)
        _, logits = self.decoder.step(numbers, self._ids, self._tables, [self._pool], True, (), hidden)
        assert logits is not None
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_are_the_head_s_products_with_them(kernels: CDLL, dtype: torch.dtype) -> None:
    """Rows of a step yield none, one, some and all of their tokens."""
    stepper, hidden = Stepper(kernels, dtype), torch.full((1 + 3 + 5, 64), torch.nan)
    logits = stepper.run([[0, 0, 4, 0], [3, 0, 6, 1], [1, 0, 5, 3], [2, 0, 5, 5]], hidden)
    read = hidden.bfloat16().float() if dtype == torch.bfloat16 else hidden
    expected = read @ random_head(96, 64, dtype).float().T
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_step_that_does_not_want_them_writes_none(best_kernels: CDLL) -> None:
    stepper, hidden = Stepper(best_kernels, torch.float32), torch.zeros(2, 64)
    first = stepper.run([[0, 0, 3, 2]], hidden)
    kept = hidden.clone()
    assert kept.any()
    second = stepper.run([[1, 0, 3, 2]], None)
    assert torch.equal(hidden, kept), "the memory of the step before may be somebody else's by now"
    assert not torch.equal(first, second)


def test_wanting_them_changes_no_bit_of_the_logits(best_kernels: CDLL) -> None:
    stepper = Stepper(best_kernels, torch.bfloat16)
    rows = [[0, 0, 7, 2], [1, 0, 1, 1]]
    assert torch.equal(stepper.run(rows, torch.empty(3, 64)), stepper.run(rows, None))
