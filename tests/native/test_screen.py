"""The screen of lm_head: its bounds hold, it decides what is computed, and the greedy token stays the same."""

from __future__ import annotations

from ctypes import CDLL

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.common.kv_format import PLAIN
from kernels.common.quantize import dequantize, quantize_activations, quantize_weight
from kernels.cpu.decoder import NativeDecoder, NativeForm, NativeLayer, NativeNorm, NativeShape
from kernels.cpu.isa import AMX_EMULATED
from kernels.cpu.linear import PackedLinear
from kernels.cpu.memory import Arena
from kernels.cpu.screen import GROUP, Screen

DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # that the head is held in
HEADS, HEAD_DIM, INTERMEDIATE, MAX_LEN, BLOCK = 2, 32, 64, 32, 32
SLOTS = 10  # more than are screened together


class Model:
    """One layer and a given lm_head. The tokens' embeddings are random; each row of a step is a sequence of one token."""

    def __init__(self, library: CDLL, lm_head: Tensor, scale: float = 1.0) -> None:
        rng = torch.Generator().manual_seed(0)  # a seed other than random_head's, so that no token wins by far
        vocab, hidden = lm_head.shape
        lm_head = as_given(lm_head)
        dtype, arena = lm_head.dtype, Arena()
        self.library = library

        def linear(rows: int, columns: int) -> PackedLinear:
            weight = torch.randn(rows, columns, generator=rng) * columns**-0.5
            return PackedLinear.of_floats(library, arena, weight.to(dtype))

        ones = NativeNorm(torch.ones(hidden))
        self.layer = NativeLayer(
            linear(3 * HEADS * HEAD_DIM, hidden),
            linear(hidden, HEADS * HEAD_DIM),
            linear(2 * INTERMEDIATE, hidden),
            linear(hidden, INTERMEDIATE),
            ones,
            ones,
        )
        self.embedding = (torch.randn(vocab, hidden, generator=rng) * scale).to(dtype)
        self.lm_head = PackedLinear.of_floats(library, arena, lm_head)

    def decoder(self, screen: Screen | None) -> NativeDecoder:
        shape = NativeShape(HEADS, HEADS, HEAD_DIM, INTERMEDIATE, BLOCK, PLAIN, MAX_LEN)
        norm = NativeNorm(torch.ones(self.embedding.shape[1]))
        return NativeDecoder(
            self.library, shape, NativeForm(1e-5), self.embedding, [self.layer], norm, self.lm_head, screen
        )

    def greedy(self, screen: Screen | None, num_rows: int, wants_logits: bool = False) -> tuple[np.ndarray, Tensor]:
        decoder = self.decoder(screen)
        ids = torch.arange(SLOTS)[:, None].repeat(1, MAX_LEN) % len(self.embedding)
        tables = np.arange(SLOTS, dtype=np.int32)[:, None]
        pool = torch.zeros(SLOTS, decoder.kv_block_bytes, dtype=torch.uint8)
        rows = np.array([[slot, 0, 1, 1] for slot in range(num_rows)], dtype=np.int32)
        return decoder.step(rows, ids, tables, [pool], wants_logits)


def random_head(vocab: int, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(vocab)).to(dtype)


def as_given(head: Tensor) -> Tensor:
    """A head that is to be held in float16 is given in float32."""
    return head.float() if head.dtype == torch.float16 else head


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab, hidden", [(33, 64), (96, 40), (200, 300)])
def test_no_logit_is_further_from_its_screened_value_than_the_screen_says(
    kernels: CDLL, dtype: torch.dtype, vocab: int, hidden: int
) -> None:
    w = random_head(vocab, hidden, dtype)
    w[:, : hidden // 2] *= 40  # uneven rows
    w[vocab // 2] = 0
    screen = Screen(kernels, PackedLinear.of_floats(kernels, Arena(), as_given(w)))
    kept = dequantize(*quantize_weight(w, GROUP), GROUP).double()
    norm, lost = kept.norm(dim=1), (w.double() - kept).norm(dim=1)
    assert (screen.norm[:vocab] >= norm).all() and (screen.norm[:vocab] <= norm * 1.01).all()
    assert (screen.error[:vocab] >= lost).all() and (screen.error[:vocab] <= lost * 1.01 + norm * 1e-3).all()
    assert (screen.error[vocab:] > 1e38).all()  # columns that do not exist make their panel computed
    x = random_head(50, hidden, dtype).double()
    of_x = dequantize(*quantize_activations(x.float(), GROUP), GROUP).double()
    distance = (x @ w.double().T - of_x @ kept.T).abs()
    bound = x.norm(dim=1)[:, None] * screen.error[:vocab] + (x - of_x).norm(dim=1)[:, None] * screen.norm[:vocab]
    assert (distance <= bound).all()
    assert (distance * 30 >= bound).any(dim=1).all(), "a bound that is far too wide screens nothing"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab, hidden", [(33, 64), (1000, 96), (4099, 72)])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 9])
def test_the_token_is_that_of_the_whole_product(
    kernels: CDLL, isa: str, dtype: torch.dtype, vocab: int, hidden: int, num_rows: int
) -> None:
    vocab = min(vocab, 1000) if isa == AMX_EMULATED else vocab  # the emulation is slow
    w = random_head(vocab, hidden, dtype)
    half = -(-vocab // 2)
    w[half:] = w[: vocab - half].clone()  # every logit twice, the greatest too: the lower id wins
    w[half - 1] = w[0]
    w[5:half:7] = (w[5:half:7].float() * (1 + 2**-8)).to(dtype)  # and some beside another by a rounding
    model = Model(kernels, w)
    greedy, _ = model.greedy(Screen(kernels, model.lm_head), num_rows)
    expected, logits = model.greedy(None, num_rows, wants_logits=True)
    assert greedy.tolist() == expected.tolist() == logits.argmax(dim=1).tolist()
    assert greedy.max() < half


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8])
def test_logits_closer_to_each_other_than_int8_tells_apart_are_told_apart(
    kernels: CDLL, dtype: torch.dtype, num_rows: int
) -> None:
    w = random_head(1, 64, torch.float32) + 0.003 * random_head(640, 64, torch.float32)
    model = Model(kernels, w.to(dtype))
    greedy, _ = model.greedy(Screen(kernels, model.lm_head), num_rows)
    assert greedy.tolist() == model.greedy(None, num_rows)[0].tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_weights_that_are_no_numbers_are_not_screened_away(kernels: CDLL, value: float) -> None:
    w = random_head(300, 64, torch.float32)
    w[170, 3] = value
    model = Model(kernels, w)
    greedy, _ = model.greedy(Screen(kernels, model.lm_head), 8)
    expected, _ = model.greedy(None, 8)
    assert greedy.tolist() == expected.tolist()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30, float("inf")])
def test_hidden_states_out_of_the_ordinary_choose_as_without_a_screen(kernels: CDLL, scale: float) -> None:
    model = Model(kernels, random_head(300, 64, torch.bfloat16), scale)
    greedy, _ = model.greedy(Screen(kernels, model.lm_head), 8)
    expected, _ = model.greedy(None, 8)
    assert greedy.tolist() == expected.tolist()


def lying_screen(model: Model, panel: int) -> Screen:
    """The screen of another lm_head, which claims no error: for every row, only a column of this panel has a logit above 0."""
    w = torch.zeros(model.lm_head.shape, dtype=model.embedding.dtype)
    w[32 * panel], w[32 * panel + 1] = 1, -1
    screen = Screen(model.library, PackedLinear.of_floats(model.library, Arena(), w))
    screen.error.zero_(), screen.norm.zero_()
    return screen


@pytest.mark.parametrize("num_rows", [1, 8])
def test_what_the_screen_rules_out_is_not_computed(kernels: CDLL, num_rows: int) -> None:
    model = Model(kernels, random_head(320, 64, torch.bfloat16))
    _, logits = model.greedy(None, num_rows, wants_logits=True)
    for panel in range(10):
        greedy, _ = model.greedy(lying_screen(model, panel), num_rows)
        columns = slice(32 * panel, 32 * panel + 32)
        assert greedy.tolist() == (logits[:, columns].argmax(dim=1) + 32 * panel).tolist()


@pytest.mark.parametrize("num_rows, wants_logits", [(1, True), (9, False)])
def test_a_step_that_wants_logits_or_has_many_rows_is_not_screened(
    kernels: CDLL, num_rows: int, wants_logits: bool
) -> None:
    model = Model(kernels, random_head(320, 64, torch.bfloat16))
    expected, _ = model.greedy(None, num_rows)
    panel = 9 - int(expected[0]) // 32  # a panel other than the first row's
    greedy, _ = model.greedy(lying_screen(model, panel), num_rows, wants_logits)
    assert greedy.tolist() == expected.tolist()


def test_int8_weights_and_biases_have_no_screen(kernels: CDLL) -> None:
    w = random_head(64, 64, torch.float32)
    q, scales = quantize_weight(w, GROUP)
    layers = [
        PackedLinear.of_int8(kernels, Arena(), q, scales, GROUP, None, True),
        PackedLinear.of_floats(kernels, Arena(), w, torch.ones(64)),
    ]
    for layer in layers:
        assert not Screen.fits(layer)
        with pytest.raises(ValueError, match="int8 weights or a bias"):
            Screen(kernels, layer)
