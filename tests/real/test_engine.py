"""What the engine computes of published weights: transformers' numbers, and the same ones after evictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from backend.api import EngineConfig, OutputConfig
from backend.api.config.schema import Kernels, KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.text.tokenizer import Tokenizer
from tests.model.gathering import Engine
from tests.real.conftest import RealModel

pytestmark = pytest.mark.real
NEW = 24
TOLERANCE = 2e-3  # of a log-probability in float32: sums in another order, through thirty layers
NEAR_TIE = 1e-3  # two best log-probabilities closer than this: either token is right
QUESTIONS = [
    f"{beginning} {subject}"
    for beginning in ("What is", "Write one sentence about", "List three facts about", "def count(", "Translate to German:")
    for subject in ("the capital of France?", "rain.", "a prime number", "café, naïve and 12345", "the sea", "JSON {\"a\": 1}")
]  # fmt: skip


class Answer(NamedTuple):
    tokens: list[int]
    log_probs: list[float]


def answers(
    model: RealModel, prompts: Sequence[list[int]], pool_tokens: int, evict: bool = False, kernels: Kernels = "auto"
) -> list[Answer]:
    """Greedy answers of NEW tokens to all prompts at once. `evict`: all KV is lost now and then."""
    engine = Engine(
        EngineConfig(
            ModelConfigSection(
                path=str(model.path), dtype="float32", device="cpu", kernels=kernels, num_threads=1, max_seq_len=512
            ),
            KvCacheConfig(max_tokens=pool_tokens, watermark=0.0),
            SchedulerConfig(max_batch_size=32, policy="max_utilization"),
        )
    )
    output = OutputConfig(return_log_probs=True, exclude_input_from_output=True)
    ids = [engine.ask(prompt, NEW, output) for prompt in prompts]
    engine.run(evict)
    assert (engine.core.counters.recomputed_tokens_total > 0) == evict
    results = [engine.responses[i][-1].result for i in ids]
    return [Answer(result.output_token_ids[0], result.log_probs[0]) for result in results]


@pytest.fixture(scope="module")
def prompts(model: RealModel) -> list[list[int]]:
    tokenizer = Tokenizer.from_directory(model.path)
    return [tokenizer.encode(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def answered(model: RealModel, prompts: list[list[int]]) -> list[Answer]:
    return answers(model, prompts, 4096)


@pytest.fixture(scope="module")
def exact(model: RealModel, prompts: list[list[int]]) -> list[Answer]:
    """By kernels that do not round the inputs of blocks."""
    return answers(model, prompts, 4096, kernels="torch")


@torch.inference_mode()
def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(
    model: RealModel, prompts: list[list[int]], exact: list[Answer]
) -> None:
    assert len(prompts) == 30
    for prompt, (tokens, log_probs) in zip(prompts, exact, strict=True):
        assert len(tokens) == len(log_probs) == NEW
        logits = model.transformers(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(1)
        own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (torch.tensor(log_probs) - own).abs().max() <= TOLERANCE
        assert (expected.max(1).values - own).max() <= NEAR_TIE


def test_evictions_change_neither_tokens_nor_log_probabilities(
    model: RealModel, prompts: list[list[int]], answered: list[Answer]
) -> None:
    """The pool holds a few of the thirty: others wait, and all are computed again from their token ids, several times."""
    assert answers(model, prompts, 384, evict=True) == answered
