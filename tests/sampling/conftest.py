"""Helpers of the sampling tests: run Cases through a Sampler, on the torch path and on the native one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from ctypes import CDLL

import numpy as np
import pytest
import torch

from backend.core.step import NewRow, SampledToken, SlotId
from backend.sampling.sampler import Sampler
from kernels.cpu.build import NativeUnavailable, load
from kernels.cpu.sampling import NativeSampling
from tests.sampling.reference import Case

SANITIZE = "EVERBATCH_TEST_SANITIZE"  # set by test_native_invariance for a process of its own
Run = Callable[..., list[SampledToken]]
MakeSampler = Callable[[int, int], Sampler]  # slots, vocabulary


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def library() -> CDLL:
    """The native kernels of this machine's best variant; with AddressSanitizer where SANITIZE says so."""
    try:
        return load(sanitize=bool(os.environ.get(SANITIZE)))
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def native(library: CDLL) -> NativeSampling:
    return NativeSampling(library)


@pytest.fixture(params=["torch", "native"])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_sampler(path: str, request: pytest.FixtureRequest) -> MakeSampler:
    library = request.getfixturevalue("library") if path == "native" else None
    return lambda num_slots, vocab: Sampler(num_slots, vocab, torch.device("cpu"), library)


@pytest.fixture
def run(make_sampler: MakeSampler) -> Run:
    return lambda *args, **options: run_cases(make_sampler, *args, **options)


def run_cases(
    make_sampler: MakeSampler,
    cases: list[Case],
    slots: list[int] | None = None,
    num_slots: int | None = None,
    return_log_probs: bool = False,
    top_log_probs: int = 0,
) -> list[SampledToken]:
    """One call of `sample` with one row per case, in the given slots."""
    slots = list(range(len(cases))) if slots is None else slots
    num_slots = max(slots) + 1 if num_slots is None else num_slots
    vocab = len(cases[0].logits)
    sampler = make_sampler(num_slots, vocab)
    buffer = torch.full((num_slots, max(len(case.tokens) for case in cases) + 3), vocab - 1)
    for case, slot in zip(cases, slots):
        buffer[slot, : len(case.tokens)] = torch.tensor(case.tokens)
        sampler.set_row(
            NewRow(
                slot=SlotId(slot), token_ids=case.tokens, num_prompt_tokens=case.num_prompt,
                num_sampled_before=case.num_sampled_before, block_ids=[], sampling=case.config, end_ids=case.end_ids,
                bad_words=case.bad_words, return_log_probs=return_log_probs, top_log_probs=top_log_probs,
            )
        )  # fmt: skip
    logits = torch.from_numpy(np.stack([case.logits for case in cases]).astype(np.float32))
    return sampler.sample(logits, slots, buffer, [len(case.tokens) for case in cases])
