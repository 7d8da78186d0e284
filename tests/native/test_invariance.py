"""A token's logits are the same, bit for bit, whatever ran beside it, however its prompt was cut, wherever its KV lies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from kernels.cpu.isa import AMX_EMULATED, supported_isas
from tests.model.driver import Driver
from tests.native.families import VOCAB, Family, family_of_super_blocks, random_family
from tests.native.harness import Format, native_driver, prompt, threads

FORMATS = [
    Format("bfloat16"),
    Format("bfloat16", "int8", kv="int8"),
    Format("bfloat16", "w8a8"),
    Format("bfloat16", "w4a8"),
    Format("float32", kv="int8"),
    Format("float32", "int8"),
    Format("float32", "w8a8", kv="int8"),
    Format("float32", kv="int8", super_blocks=True),
    Format("bfloat16", kv="int4"),
    Format("bfloat16", kv="k8v4"),
    Format("float32", kv="k8v4"),
    Format("float32", "w8a8", kv="int4"),
]
# Where other instructions come in: products of float, int8 and 4-bit weights, int8 unpacked to bfloat16, KV unpacked.
SOME_FORMATS = [Format("bfloat16"), Format("bfloat16", "int8", kv="int8"), Format("float32", "w8a8")]
SOME_FORMATS += [
    Format("bfloat16", "w4a8"),
    Format("bfloat16", kv="int4", super_blocks=True),
    Format("bfloat16", kv="k8v4"),
]
BEST, *OTHERS = supported_isas()
CASES = [(BEST, form) for form in FORMATS] + [(isa, form) for isa in (*OTHERS, AMX_EMULATED) for form in SOME_FORMATS]
NUM_NEW = 12


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Family]:
    return [random_family(tmp_path_factory.mktemp(f"invariant{seed}"), seed) for seed in range(4)]


class Scene:
    """One family in one format: what a sequence that runs alone, whole, on one thread yields."""

    def __init__(self, kernels: CDLL, family: Family, form: Format, length: int) -> None:
        self._kernels, self._form, self._family = kernels, form, family
        self.tokens = prompt(length, VOCAB)
        driver = self.driver()
        driver.begin(0, self.tokens)
        self.of_prompt = driver.run(0, [length])
        self.of_output = driver.generate([0], NUM_NEW)[0]
        self.all_tokens = driver.tokens[0]
        assert not self.of_prompt.isnan().any() and not self.of_output.isnan().any()

    def driver(self, seed: int = 0, block_size: int = 32) -> Driver:
        directory, window, attention = self._family
        options = dict(num_blocks=4096 // block_size, window=window, seed=seed)
        return native_driver(directory, self._kernels, self._form, block_size, attention, **options)

    def check(self, driver: Driver, chunks: list[int], slot: int = 0) -> None:
        driver.begin(slot, self.tokens)
        assert_same(driver.run(slot, chunks), self.of_prompt)
        self.check_output(driver, [slot], slot)

    def check_output(self, driver: Driver, slots: list[int], slot: int) -> None:
        assert_same(driver.generate(slots, NUM_NEW)[slot], self.of_output)
        assert driver.tokens[slot] == self.all_tokens


def assert_same(measured: Tensor, expected: Tensor) -> None:
    assert measured.shape == expected.shape
    rows = (measured != expected).any(1).nonzero().flatten().tolist()
    assert not rows, f"{len(rows)} of {len(expected)} tokens differ, from token {rows[0]} on"


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def scene(
    request: pytest.FixtureRequest,
    variant: Callable[[str | None], CDLL],
    families: list[Family],
    tmp_path_factory: pytest.TempPathFactory,
) -> Scene:
    """The formats take the families in turn. What is slow gets a short prompt and small heads: the emulation, and values that are
    looked up one by one where there is no instruction for it."""
    isa, form = request.param
    is_slow = isa == AMX_EMULATED or (isa == "generic" and form.quantization == "w4a8")
    family = families[1 if is_slow else CASES.index(request.param) % len(families)]
    if form.super_blocks:
        family = family_of_super_blocks(tmp_path_factory.mktemp("super_blocks"))
    return Scene(variant(isa), family, form, 70 if is_slow else 301)


def test_a_prompt_in_chunks_yields_the_logits_of_the_whole(scene: Scene) -> None:
    for sizes in ([16], [1, 31, 2, 30, 100], [33], [255, 1, 1]):
        scene.check(scene.driver(seed=3), cut(len(scene.tokens), sizes), slot=2)


def cut(length: int, sizes: list[int]) -> list[int]:
    """Pieces of these sizes, over and over, that add up to `length`."""
    pieces: list[int] = []
    for size in itertools.cycle(sizes):
        if length == 0:
            return pieces
        pieces.append(min(size, length))
        length -= pieces[-1]
    raise AssertionError("a cycle has no end")


def test_a_prompt_token_by_token_yields_the_logits_of_the_whole(scene: Scene) -> None:
    scene.check(scene.driver(seed=4), [1] * len(scene.tokens))


def test_what_is_computed_again_is_what_it_was(scene: Scene) -> None:
    """This is what follows an eviction: prompt and output run as one prompt."""
    driver = scene.driver(seed=5)
    driver.begin(1, scene.all_tokens[:-1])
    assert_same(driver.run(1, [len(scene.all_tokens) - 1]), torch.cat((scene.of_prompt, scene.of_output)))


def test_the_block_size_changes_nothing(scene: Scene) -> None:
    scene.check(scene.driver(seed=6, block_size=128), [len(scene.tokens) - 40, 40])


def test_the_number_of_threads_changes_nothing(scene: Scene) -> None:
    for count in (2, 3):
        with threads(count):
            scene.check(scene.driver(seed=7), [len(scene.tokens) - 33, 33])


def test_six_others_in_the_batch_change_nothing(scene: Scene) -> None:
    """Six prompts of other lengths; they and the sequence itself run in random chunks and in random order."""
    driver, rng = scene.driver(seed=8), random.Random(8)
    slots = list(range(7))
    for slot in slots:
        driver.begin(slot, scene.tokens if slot == 3 else prompt(rng.randint(1, 150), VOCAB, seed=slot))
    parts = []
    while driver.computed[3] < len(scene.tokens):
        rng.shuffle(slots)
        left = {slot: len(driver.tokens[slot]) - driver.computed[slot] for slot in slots}
        parts.append(driver.step([(slot, min(left[slot], rng.choice([1, 5, 32, 60]))) for slot in slots])[3])
    assert_same(torch.cat(parts), scene.of_prompt)
    scene.check_output(driver, slots, 3)


def test_a_head_that_was_found_in_the_cache_changes_nothing(scene: Scene) -> None:
    """Two whole blocks of another sequence, and a copy of the head of its third, which holds other tokens behind it."""
    driver, found = scene.driver(seed=9), 2 * 32 + 5
    driver.window = None  # so that the other sequence keeps its blocks
    driver.begin(0, scene.tokens[:found] + prompt(30, VOCAB, seed=1))
    driver.run(0, [40, found - 10])
    table = [*driver.tables[0][:2], driver.copy(driver.tables[0][2])]
    driver.begin(1, scene.tokens, found, table)
    assert_same(driver.run(1, [len(scene.tokens) - found]), scene.of_prompt[found:])
    scene.check_output(driver, [1], 1)


@pytest.mark.parametrize("form", [form for form in FORMATS if form.dtype == "bfloat16"], ids=str)
def test_the_kv_of_a_prefix_is_the_same_bytes_however_it_was_computed(
    best_kernels: CDLL, families: list[Family], form: Format
) -> None:
    def kv(chunks: list[int], others: int, seed: int) -> list[Tensor]:
        driver = native_driver(families[0].directory, best_kernels, form, num_blocks=100, seed=seed)
        for slot in range(others + 1):
            driver.begin(slot, prompt(200, VOCAB, seed=slot))
        for chunk in chunks:
            driver.step([(slot, chunk) for slot in reversed(range(others + 1))])
        pools = driver.runner.storage.pools
        return [pool[block].view(torch.uint8).clone() for pool in pools for block in driver.tables[0][:6]]

    expected = kv([200], others=0, seed=1)
    assert len({part.numpy().tobytes() for part in expected}) == len(expected), "all blocks hold something of their own"
    for chunks, others in (([16] * 12 + [8], 0), ([1] * 200, 0), ([100, 7, 93], 4)):
        for measured, part in zip(kv(chunks, others, seed=2), expected, strict=True):
            assert torch.equal(measured, part)
