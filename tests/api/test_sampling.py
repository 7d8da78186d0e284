"""When a request is greedy, and when it needs penalties."""

from __future__ import annotations

import pytest

from backend.api import SamplingConfig
from backend.api.sampling import tensorrt_llm_sampling


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seed": 7},
        {"min_tokens": 3, "repetition_penalty": 1.2, "logit_bias": {1: 2.0}},
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 50, "top_p": 0.9, "min_p": 0.1},
        {"top_k": 1},
        {"top_k": 1, "temperature": 2.0},
    ],
)
def test_decoding_is_greedy_unless_sampling_is_asked_for(fields: dict[str, object]) -> None:
    assert SamplingConfig(**fields).is_greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.01},
        {"top_k": 0},
        {"top_k": 2},
        {"top_p": 1.0},
        {"top_p": 0.5},
        {"min_p": 0.0},
    ],
)
def test_any_one_of_temperature_top_k_top_p_and_min_p_asks_for_sampling(fields: dict[str, float]) -> None:
    assert not SamplingConfig(**fields).is_greedy


@pytest.mark.parametrize(
    "name, neutral",
    [
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
    ],
)
def test_a_neutral_penalty_is_none(name: str, neutral: float) -> None:
    assert not SamplingConfig().has_penalties
    assert not SamplingConfig(**{name: neutral}).has_penalties
    assert SamplingConfig(**{name: neutral + 0.5}).has_penalties


@pytest.mark.parametrize(
    ("fields", "is_greedy"),
    [
        ({}, True),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "top_k": 0, "top_p": 0.0, "min_p": 0.0}, True),
        ({"top_k": 0}, True),
        ({"temperature": 1.0, "top_k": 1, "top_p": 0.9}, True),
        ({"temperature": 1.0, "top_k": 2}, False),
        ({"temperature": 1.0, "top_p": 1.0}, False),
        ({"top_p": 0.5}, False),
        ({"min_p": 0.1}, False),
    ],
)
def test_by_tensorrt_llms_rule_a_temperature_alone_decodes_greedily(fields: dict[str, float], is_greedy: bool) -> None:
    assert tensorrt_llm_sampling(**fields).is_greedy == is_greedy


def test_by_tensorrt_llms_rule_a_top_p_of_zero_is_none_and_a_temperature_out_of_its_limits_is_still_seen() -> None:
    config = tensorrt_llm_sampling(temperature=-1.0, top_k=4, top_p=0.0, top_p_decay=0.0, top_p_min=0.0, seed=3)
    assert config == SamplingConfig(temperature=-1.0, top_k=4, seed=3)
    assert tensorrt_llm_sampling(temperature=-1.0).temperature == -1.0
