"""Encoders: every family agrees with transformers' own forward pass, and a text's bits never depend on the texts beside it."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from backend.api import OutputConfig
from backend.architectures.hosted import ENCODERS
from tests.hosted.encoders import hidden_states, save_encoder, tiny_encoder
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.tiers import NATIVE, TORCH, TierCase
from tests.native.harness import prompt

ALL = OutputConfig(prompt_hidden_states="all")
TEXTS = [[3 + token for token in prompt(length, 157, seed=length)] for length in (45, 1, 17, 30, 45, 2, 33)]
Made = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def make(architecture: str) -> tuple[Path, PreTrainedModel]:
        model = tiny_encoder(architecture)
        return save_encoder(model, tmp_path_factory.mktemp(architecture)), model

    return make


def engine(directory: Path, tier: TierCase, **sections: dict) -> Engine:
    model = {"gather_context_logits": False, "gather_generation_logits": False}
    return Engine(engine_config(directory, tier, model=model, **{"scheduler": {"max_num_tokens": 100}, **sections}))


def embed(engine: Engine, texts: list[list[int]]) -> list[Tensor]:
    """Hidden states of texts that are sent together."""
    asked = [engine.ask(text, 0, ALL) for text in texts]
    engine.run()
    return [tensor_of(engine.responses[number][-1].result.prompt_hidden_states) for number in asked]


@pytest.mark.parametrize("tier", [TORCH, NATIVE], ids=lambda case: case.kernels)
@pytest.mark.parametrize("architecture", ENCODERS)
def test_hidden_states_are_those_of_transformers(
    encoder: Made, kernels: CDLL, architecture: str, tier: TierCase
) -> None:
    directory, model = encoder(architecture)
    for measured, expected in zip(embed(engine(directory, tier), TEXTS), hidden_states(model, TEXTS), strict=True):
        assert (measured - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_text_has_the_same_bits_alone_and_beside_others(encoder: Made, kernels: CDLL, architecture: str) -> None:
    served = engine(encoder(architecture)[0], NATIVE)
    together = embed(served, TEXTS)
    for text, expected in zip(TEXTS, together, strict=True):
        (alone,) = embed(served, [text])
        assert torch.equal(alone, expected)
