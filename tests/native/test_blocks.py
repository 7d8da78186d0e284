"""Every field of a Block in the native step: against the torch tier, and the same bits however a sequence was run."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.worker.native_tier import NativeTier, PackLinears
from kernels.cpu.isa import AMX_EMULATED
from tests.model.driver import Driver
from tests.native import blocks
from tests.native.families import VOCAB, Play
from tests.native.harness import SANITIZE, Format, drive, prompt, threads

EXACT = 1e-4  # absolute, of logits of magnitude 1 to 20: the same sums in another order
FORMATS = [
    Format("bfloat16"),
    Format("float32"),
    Format("bfloat16", "w8a8"),
]
FORMATS += [Format("bfloat16", kv="int8"), Format("float32", kv="int8"), Format("bfloat16", kv="int4")]
FORMATS += [Format("bfloat16", kv="k8v4")]
CASES = [(None, form, 101) for form in FORMATS] + [
    (AMX_EMULATED, Format("bfloat16"), 70)
]  # tokens: the emulation is slow
if SANITIZE in os.environ:
    CASES = [(None, Format("bfloat16", kv="int8"), 70)]
NUM_NEW = 4


def assert_near(measured: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0.5, "logits near zero would prove nothing"
    difference = (measured - expected).abs().max()
    assert difference <= EXACT, f"{difference:.1e}"


@pytest.fixture(scope="module")
def reference() -> Callable[[str, Play], Tensor]:
    """What the torch tier says to a play, found out once for all variants."""
    known: dict[tuple[str, Play], Tensor] = {}

    def of(name: str, play: Play) -> Tensor:
        if (name, play) not in known:
            known[name, play] = torch.cat(play.run(blocks.reference(blocks.config_of(name), num_blocks=130)))
        return known[name, play]

    return of


@pytest.mark.parametrize("name", blocks.ALL)
def test_logits_are_those_of_the_torch_tier(
    kernels: CDLL, isa: str, reference: Callable[[str, Play], Tensor], name: str
) -> None:
    play = Play(1, 2, 40) if isa == AMX_EMULATED else Play(1, 4)
    driver = blocks.native(blocks.config_of(name), kernels, num_blocks=130, seed=1)
    assert_near(torch.cat(play.run(driver)), reference(name, play))


def with_sinks_and_cap() -> ModelConfig:
    return blocks.config_of("attention sinks, softcap and windows", max_position=2304, num_layers=2)


@pytest.mark.parametrize("chunks", [[2200, 1, 1], [1, 2200, 1]])
def test_sinks_and_soft_caps_enter_once_over_many_splits(best_kernels: CDLL, chunks: list[int]) -> None:
    """The keys of single tokens are shared by threads in splits of 1,024; those of longer chunks are not."""
    logits = []
    for driver in (
        blocks.native(with_sinks_and_cap(), best_kernels, num_blocks=80),
        blocks.reference(with_sinks_and_cap(), num_blocks=80),
    ):
        driver.begin(0, prompt(sum(chunks) + 1, VOCAB))
        logits.append(driver.run(0, chunks)[-2:])
    assert_near(*logits)


@pytest.mark.parametrize("cap", [0.01, 5.0, 1e4])
def test_capped_logits_keep_to_the_cap_and_the_greedy_token_is_theirs(best_kernels: CDLL, cap: float) -> None:
    config = blocks.of_block(logit_softcap=cap, logit_scale=0.5)(blocks.plain())
    plain, capped = (blocks.native(each, best_kernels) for each in (blocks.plain(), config))
    for driver in (plain, capped):
        driver.begin(0, prompt(30, VOCAB))
    expected, logits = plain.run(0, [30]).double(), capped.run(0, [30]).double()
    exact = cap * (0.5 * expected / cap).tanh()
    assert ((logits - exact).abs() <= 1e-6 * exact.abs()).all()
    assert plain.tokens[0][-1] == capped.tokens[0][-1] == expected[-1].argmax()


def with_sinks(kernels: CDLL, sink: float | None, tokens: list[int]) -> Tensor:
    """Logits of a model all of whose sinks are this one; None: it has none."""
    model = blocks.build(blocks.config_of("attention sinks"), Format(), PackLinears(kernels))
    for layer in model.layers:
        layer.attention.sinks = None if sink is None else torch.full((blocks.HEADS,), sink)
    driver = drive(NativeTier(model, kernels, 32), model, kernels)
    driver.begin(0, tokens)
    return driver.run(0, [len(tokens)])


def test_a_sink_far_below_all_scores_changes_no_bit(best_kernels: CDLL) -> None:
    tokens = prompt(40, VOCAB)
    assert torch.equal(with_sinks(best_kernels, -1e30, tokens), with_sinks(best_kernels, None, tokens))


def test_a_sink_far_above_all_scores_leaves_no_weight_to_keys(best_kernels: CDLL) -> None:
    """A token then yields the same whatever stands before it."""
    tokens, others = prompt(40, VOCAB), [*prompt(39, VOCAB, seed=1), prompt(40, VOCAB)[-1]]
    logits = with_sinks(best_kernels, 1e4, tokens)
    assert logits.isfinite().all() and torch.equal(logits[-1], with_sinks(best_kernels, 1e4, others)[-1])


class Scene:
    """What a sequence that runs alone, whole, on one thread yields."""

    def __init__(self, kernels: CDLL, name: str, form: Format, length: int) -> None:
        self._kernels, self._config, self._form = kernels, blocks.config_of(name), form
        self.tokens = prompt(length, VOCAB)
        with threads(1):
            driver = self.driver()
            driver.begin(0, self.tokens)
            self.of_prompt = driver.run(0, [length])
            self.of_output = driver.generate([0], NUM_NEW)[0]
        self.all_tokens = driver.tokens[0]
        assert self.of_prompt.isfinite().all() and self.of_output.isfinite().all()

    def driver(self, seed: int = 0) -> Driver:
        return blocks.native(self._config, self._kernels, self._form, num_blocks=100, seed=seed)

    def check_chunks(self, size: int) -> None:
        driver = self.driver(seed=1)
        driver.begin(2, self.tokens)
        whole, rest = divmod(len(self.tokens), size)
        assert torch.equal(driver.run(2, [size] * whole + [rest] * (rest > 0)), self.of_prompt)
        assert torch.equal(driver.generate([2], NUM_NEW)[2], self.of_output)

    def check_again(self) -> None:
        """What follows an eviction: prompt and output run as one prompt."""
        driver = self.driver(seed=2)
        driver.begin(1, self.all_tokens[:-1])
        measured = driver.run(1, [len(self.all_tokens) - 1])
        assert torch.equal(measured, torch.cat((self.of_prompt, self.of_output)))

    def check_in_a_batch(self) -> None:
        driver, rng = self.driver(seed=3), random.Random(3)
        slots = list(range(5))
        for slot in slots:
            driver.begin(slot, self.tokens if slot == 3 else prompt(rng.randint(1, 100), VOCAB, seed=slot))
        parts = []
        while driver.computed[3] < len(self.tokens):
            rng.shuffle(slots)
            left = {slot: len(driver.tokens[slot]) - driver.computed[slot] for slot in slots}
            parts.append(driver.step([(slot, min(left[slot], rng.choice([1, 5, 32, 60]))) for slot in slots])[3])
        assert torch.equal(torch.cat(parts), self.of_prompt)
        assert torch.equal(driver.generate(slots, NUM_NEW)[3], self.of_output)


@pytest.mark.parametrize("name", blocks.FAMILIES)
@pytest.mark.parametrize("isa, form, length", CASES, ids=str)
def test_a_sequence_has_the_same_bits_alone_batched_chunked_and_computed_again(
    variant: Callable[[str | None], CDLL], isa: str | None, form: Format, length: int, name: str
) -> None:
    """There are more than 64 tokens, from which on the MLP goes another way."""
    scene = Scene(variant(isa), name, form, length)
    scene.check_chunks(33)
    scene.check_again()
    scene.check_in_a_batch()
