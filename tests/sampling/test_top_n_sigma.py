"""top_n_sigma: which tokens can be drawn, on every way of choosing, beside other rows, and over the wires that have it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from backend.api import SamplingConfig
from backend.core.step import NewRow, SampledToken
from backend.sampling.sampler import Sampler
from backend.sampling.torch_choice import keep_top_n_sigma
from backend.serving.wires.everbatch import Generate
from gateway.messages import ChatRequest
from gateway.translate import sampling
from kernels.cpu.build import load

VOCAB, SLOTS = 300, 8
BANNED = 7
TOKENS = torch.zeros(SLOTS, 64, dtype=torch.int64)


@pytest.fixture(scope="module", params=["native", "torch"])
def library(request: pytest.FixtureRequest) -> object:
    return load() if request.param == "native" else None


def kept_by_the_formula(logits: list[float], n: float) -> set[int]:
    finite = [value for value in logits if math.isfinite(value)]
    mean = sum(finite) / len(finite)
    sigma = math.sqrt(sum((value - mean) ** 2 for value in finite) / len(finite))
    return {token for token, value in enumerate(logits) if value >= max(finite) - n * sigma}


def random_logits(seed: int) -> Tensor:
    logits = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[BANNED] = -torch.inf
    return logits


def drawn(library: object, logits: Tensor, rows: list[SamplingConfig], known: int = 4) -> list[SampledToken]:
    """One token for each row, all of which have the same logits."""
    sampler = Sampler(SLOTS, VOCAB, torch.device("cpu"), library)  # type: ignore[arg-type]
    for slot, config in enumerate(rows):
        sampler.set_row(NewRow(slot, [1] * known, known, 0, [], config, return_log_probs=True))
    return sampler.sample(logits.repeat(len(rows), 1), list(range(len(rows))), TOKENS, [known] * len(rows))


@pytest.mark.parametrize("n", [0.3, 1.0, 2.5])
def test_the_tokens_that_stay_are_those_of_the_formula(n: float) -> None:
    logits = random_logits(3)
    expected = kept_by_the_formula(logits.tolist(), n)
    keep_top_n_sigma(logits, n)
    assert set(logits.isfinite().nonzero().ravel().tolist()) == expected
    assert 1 < len(expected) < VOCAB - 1


def test_only_they_are_drawn_and_all_of_them(library: object) -> None:
    logits = random_logits(5)
    expected = kept_by_the_formula(logits.tolist(), 0.5)
    seen = set()
    for first in range(0, 400, SLOTS):
        rows = [SamplingConfig(temperature=50.0, top_n_sigma=0.5, seed=first + i) for i in range(SLOTS)]
        seen |= {sample.token_id for sample in drawn(library, logits, rows)}
    assert seen == expected


def test_log_probabilities_are_those_of_all_tokens_and_rows_beside_it_are_as_they_are_alone(library: object) -> None:
    logits = random_logits(6)
    rows = [
        SamplingConfig(temperature=2.0, seed=1),
        SamplingConfig(temperature=2.0, seed=1, top_n_sigma=0.5),
        SamplingConfig(),
        SamplingConfig(temperature=2.0, top_p=0.8, seed=4, top_n_sigma=0.0),
        SamplingConfig(temperature=2.0, top_p=0.8, seed=4),
    ]
    together = drawn(library, logits, rows)
    for sample, row in zip(together, rows, strict=True):
        (alone,) = drawn(library, logits, [row])
        assert (alone.token_id, alone.log_prob) == (sample.token_id, sample.log_prob)
        assert sample.log_prob == pytest.approx(float(torch.log_softmax(logits, -1)[sample.token_id]), abs=1e-5)
    assert together[3].token_id == together[4].token_id, "0 is off"


def test_a_greedy_row_heeds_it_as_little_as_top_p(library: object) -> None:
    logits = random_logits(8)
    (sample,) = drawn(library, logits, [SamplingConfig(temperature=0.0, top_n_sigma=1.0)])
    assert sample.token_id == int(logits.argmax())


def test_the_model_and_the_endpoint_take_it() -> None:
    asked = Generate(prompt="a", top_n_sigma=1.5)
    assert asked.sampling_config().top_n_sigma == 1.5
    message = {"model": "m", "messages": [{"role": "user", "content": "a"}], "top_n_sigma": 1.5}
    assert sampling(ChatRequest.model_validate(message))["top_n_sigma"] == 1.5
    with pytest.raises(ValueError, match="less than or equal to 100"):
        ChatRequest.model_validate({**message, "top_n_sigma": 101})
