"""A row gets the same bits in any batch, on any number of threads, from any instruction set; and memory is respected."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.core.step import SampledToken
from backend.sampling.sampler import Sampler
from kernels.cpu.build import NativeUnavailable, asan_environment, load
from kernels.cpu.isa import supported_isas
from kernels.cpu.sampling import NativeSampling
from tests.sampling.conftest import SANITIZE, run_cases
from tests.sampling.native import KINDS, Parameters, draw, logits_of
from tests.sampling.reference import Case
from tests.sampling.test_sampler_choice import CONFIGS, random_case

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 540  # below pytest's own


def some_cases(vocab: int, num: int) -> list[Case]:
    rng = random.Random(vocab)
    return [random_case(rng, CONFIGS[i % len(CONFIGS)], vocab) for i in range(num)]


def choose(library: CDLL, cases: list[Case]) -> list[SampledToken]:
    make = lambda num_slots, vocab: Sampler(num_slots, vocab, torch.device("cpu"), library)
    return run_cases(make, cases, return_log_probs=True, top_log_probs=7)


def test_the_number_of_threads_and_rows_changes_nothing(library: CDLL) -> None:
    cases = some_cases(5003, 24)
    one_thread = choose(library, cases)
    assert one_thread == [token for i in range(24) for token in numbered(choose(library, cases[i : i + 1]), i)]
    for threads in (2, 3, 40):
        torch.set_num_threads(threads)
        assert choose(library, cases) == one_thread


def numbered(tokens: list[SampledToken], slot: int) -> list[SampledToken]:
    return [SampledToken(slot, token.token_id, token.log_prob, token.top_log_probs) for token in tokens]


@pytest.mark.parametrize("isa", supported_isas())
def test_every_instruction_set_gives_the_same_bits(library: CDLL, isa: str) -> None:
    variant = load(isa)
    generator = torch.Generator().manual_seed(0)
    for vocab in (17, 129, 4097, 32000):
        for kind in KINDS:
            logits = logits_of(kind, vocab, generator)
            for temperature in (0.3, 1.0, 1.7):
                weights = NativeSampling(variant).weights(logits, temperature)
                assert torch.equal(weights, NativeSampling(library).weights(logits, temperature))
            rows = [Parameters(0.7, *filters) for filters in ((0, 1.0), (40, 1.0), (0, 0.9), (40, 0.9, 0.05))]
            row_logits = logits.expand(len(rows), -1)
            assert draw(NativeSampling(variant), row_logits, rows) == draw(NativeSampling(library), row_logits, rows)
        cases = some_cases(vocab, len(CONFIGS))
        assert choose(variant, cases) == choose(library, cases)


def test_the_logits_are_the_same_afterwards_bit_for_bit(library: CDLL) -> None:
    cases = some_cases(1003, 24)
    logits = torch.from_numpy(np.stack([case.logits for case in cases]))
    before = logits.clone()
    seen = []

    class Watched(Sampler):
        def sample(self, given: torch.Tensor, *args: object) -> list[SampledToken]:
            seen.append(given)
            return super().sample(given, *args)

    run_cases(lambda slots, vocab: Watched(slots, vocab, torch.device("cpu"), library), cases)
    assert torch.equal(seen[0], before)


def test_nothing_is_read_or_written_outside_its_memory() -> None:
    """The kernel's and the rules' tests, in a process with AddressSanitizer."""
    files = [f"tests/sampling/test_{name}.py" for name in ("native_kernel", "sampler_rules", "sampler_choice")]
    try:
        environment = os.environ | asan_environment() | {SANITIZE: "1"}
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", "not 128256"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    child = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=TIMEOUT_S)
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    assert "passed" in child.stdout and "skipped" not in child.stdout
