"""Contexts of several splits (native/attention.h): threads share the keys of a token, and nobody can tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from kernels.cpu.isa import supported_isas
from tests.model.driver import Driver
from tests.native.harness import SANITIZE, Attention, Format, native_driver, prompt, threads, torch_driver
from tools.make_random_model import make_random_model

SPLIT = 1024  # positions, SPLIT of native/attention.h
VOCAB, LENGTH = 97, 2 * SPLIT + 6
NUM_NEW = 12  # the third split begins among the last tokens
FORMATS = [Format("bfloat16"), Format("float32"), Format("bfloat16", kv="int8"), Format("bfloat16", kv="int4")]
FORMATS += [Format("bfloat16", kv="k8v4")]
ISAS = [isa for isa in supported_isas() if isa in (supported_isas()[0], "avx2")]
EXACT = 1e-4  # absolute, of logits of magnitude 1 to 10: the same sums in another order
# The windows end within a split, and leave out a whole one (which lies behind the sink tokens).
SEEN = {"all": Attention(), "window": Attention((1500,)), "sinks": Attention((600,), sink_tokens=40)}
if SANITIZE in os.environ:  # slow: one of each kind
    ISAS, FORMATS, SEEN = ISAS[:1], FORMATS[1::2], {"sinks": SEEN["sinks"]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(
        tmp_path_factory.mktemp("long"),
        seed=1,
        hidden_size=60,
        head_dim=20,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=64,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH + NUM_NEW,
        dtype="bfloat16",
    )


def make_driver(directory: Path, library: CDLL, form: Format, seen: Attention, seed: int = 0) -> Driver:
    window = seen.windows[0] if seen.windows else None
    return native_driver(directory, library, form, 32, seen, num_blocks=200, window=window, seed=seed)


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_a_token_s_logits_depend_neither_on_chunks_nor_on_threads_nor_on_its_neighbours(
    variant: Callable[[str | None], CDLL], directory: Path, isa: str, form: Format, seen: Attention
) -> None:
    """Prompt tokens are rows of one piece, which walks all splits; a generated one has its splits shared among threads."""
    tokens = prompt(LENGTH, VOCAB)
    whole = make_driver(directory, variant(isa), form, seen)
    with threads(1):
        whole.begin(0, tokens)
        whole.run(0, [LENGTH])
        expected = whole.generate([0], NUM_NEW)[0]
        again = make_driver(directory, variant(isa), form, seen, seed=1)
        again.begin(1, whole.tokens[0][:-1])
        of_prompt = again.run(1, [1000, LENGTH + NUM_NEW - 1000])
    assert not expected.isnan().any()
    assert torch.equal(of_prompt[LENGTH:], expected)
    for count in (2, 3):
        with threads(count):
            driver = make_driver(directory, variant(isa), form, seen, seed=2)
            driver.begin(2, tokens)
            driver.begin(3, tokens[:300])
            driver.run(2, [700, LENGTH - 705, 5])
            driver.run(3, [300])
            assert torch.equal(driver.generate([3, 2], NUM_NEW)[2], expected)


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("isa", ISAS)
def test_over_several_splits_logits_are_those_of_the_torch_tier(
    variant: Callable[[str | None], CDLL], directory: Path, isa: str, seen: Attention
) -> None:
    form, tokens = Format("float32"), prompt(LENGTH, VOCAB)
    own = make_driver(directory, variant(isa), form, seen)
    window = seen.windows[0] if seen.windows else None
    of_torch = torch_driver(directory, form, 32, seen, num_blocks=200, window=window, seed=3)
    logits = []
    for driver in (own, of_torch):
        driver.begin(0, tokens)
        logits.append(torch.cat([driver.run(0, [LENGTH - 8])[-30:], driver.run(0, [1] * 8)]))
    assert logits[1].abs().max() > 1, "logits near zero would prove nothing"
    assert (logits[0] - logits[1]).abs().max() <= EXACT
