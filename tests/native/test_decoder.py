"""The whole native step against the torch tier: random models, random batches, random places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.cpu.isa import AMX_EMULATED
from tests.native.families import NUM_FAMILIES, Play, random_family
from tests.native.harness import Format, native_driver, threads, torch_driver

EXACT = 1e-4  # absolute, of logits of magnitude 1 to 10: the same sums in another order
NUM_BLOCKS = 130
EMULATED_FAMILIES = 3  # so many, and short prompts: the emulation is slow


@pytest.fixture(scope="session")
def families(tmp_path_factory) -> list[tuple[Path, int | None]]:
    return [random_family(tmp_path_factory.mktemp(f"family{seed}"), seed) for seed in range(NUM_FAMILIES)]


class Expected:
    """What the torch tier says to each play, found out once for all variants."""

    def __init__(self) -> None:
        self._known: dict[tuple, list[Tensor]] = {}

    def __call__(self, family: tuple[Path, int | None], form: Format, play: Play, key: object) -> list[Tensor]:
        key = (family, form, key)
        if key not in self._known:
            driver = torch_driver(family[0], form, 32, num_blocks=NUM_BLOCKS, window=family[1], seed=1)
            self._known[key] = play.run(driver)
        return self._known[key]


@pytest.fixture(scope="session")
def expected() -> Expected:
    return Expected()


def plays(families, isa: str) -> list:
    """(number, family, play) of a variant."""
    if isa == AMX_EMULATED:
        return [(seed, families[seed], Play(seed, 4, 70)) for seed in range(EMULATED_FAMILIES)]
    return [(seed, family, Play(seed, 12)) for seed, family in enumerate(families)]


def run_native(kernels, family, form: Format, play: Play, seed: int) -> list[Tensor]:
    block_size = 32 << seed % 2
    return play.run(
        native_driver(family[0], kernels, form, block_size, num_blocks=NUM_BLOCKS, window=family[1], seed=seed)
    )


def relative_error(measured: list[Tensor], expected: list[Tensor]) -> float:
    """Mean, over all logits; NaN if any is."""
    measured, expected = torch.cat(measured), torch.cat(expected)
    return ((measured - expected).abs().mean() / expected.std()).item()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_in_float32_logits_are_those_of_the_torch_tier(kernels, isa, families, expected, quantization):
    form = Format("float32", quantization)
    for seed, family, play in plays(families, isa):
        measured = run_native(kernels, family, form, play, seed)
        difference = max(
            (m - e).abs().max()
            for m, e in zip(measured, expected(family, form, play, (isa == AMX_EMULATED)), strict=True)
        )
        assert difference <= EXACT, f"family {seed}: {difference:.1e}"
        print("  ", isa, quantization, seed, f"{difference:.1e}")


@pytest.mark.parametrize(
    "form, limit",
    [
        (Format("bfloat16"), 0.02),
        (Format("bfloat16", "int8"), 0.02),
        (Format("float32", "w8a8"), 0.001),
        (Format("bfloat16", "w8a8"), 0.02),
        (Format("float32", int8_kv=True), 0.02),
        (Format("bfloat16", "w8a8", int8_kv=True), 0.03),
    ],
    ids=str,
)
def test_narrow_numbers_stay_near_the_same_model_in_float32(kernels, isa, families, expected, form, limit):
    """The mean error of all logits, relative to their spread."""
    for seed, family, play in plays(families, isa):
        reference = expected(family, Format("float32", form.quantization), play, (isa == AMX_EMULATED))
        error = relative_error(run_native(kernels, family, form, play, seed), reference)
        print("  ", isa, form, seed, f"{error:.2e}")
        assert error < limit, f"family {seed}: {error:.4f}"
