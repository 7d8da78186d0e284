"""`kv_cache.max_attention_window` and `kv_cache.sink_tokens` over models with and without windows, against a masked reference.

The reference is transformers' model of the same weights. Each of its layers is given the mask of the formula itself: the token at
position p sees q <= p with q > p - window or q < sink_tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from backend.api.config.schema import Windows
from tests.model.conftest import Oracle
from tests.model.driver import GroupDriver
from tests.model.test_parity import assert_equal, make_driver, prompt
from tests.model.tiers import TierCase


class MaskedOracle(Oracle):
    """`windows`: that of each layer, None = all tokens."""

    def __init__(self, model: PreTrainedModel, windows: list[int | None], sink_tokens: int = 0) -> None:
        super().__init__(model)
        self._sink_tokens = sink_tokens
        layers = model.model.layers
        assert len(layers) == len(windows)
        for layer, window in zip(layers, windows):
            layer.register_forward_pre_hook(self._masked(window), with_kwargs=True)

    def _masked(self, window: int | None) -> Callable[..., tuple[Any, dict[str, Any]]]:
        def put_mask(layer: object, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            places = torch.arange(args[0].shape[1])
            p, q = places[:, None], places[None]
            is_seen = (q <= p) & ((q > p - (window or len(places))) | (q < self._sink_tokens))
            mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)
            return args, {**kwargs, "attention_mask": mask[None, None]}

        return put_mask


def masked(directory: Path, windows: list[int | None], sink_tokens: int = 0) -> MaskedOracle:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return MaskedOracle(model, windows, sink_tokens)


def assert_parity(driver: GroupDriver, oracle: Oracle, block: int) -> None:
    """A prompt in three chunks, then five tokens, one a step. What has left the driver's window is NaN by then."""
    tokens = prompt(5 * block + 150)
    driver.begin(0, tokens)
    measured = driver.run(0, [2 * block + 1, 7, len(tokens) - 2 * block - 8])
    assert_equal(measured, oracle.logits(tokens))
    generated = driver.generate([0], 5)[0]
    assert_equal(generated, oracle.logits(driver.tokens[0][:-1])[len(tokens) :])


@pytest.mark.feature("001-29")
@pytest.mark.parametrize(
    ("name", "asked", "window"),
    [("llama2", 13, 13), ("llama2", 1, 1), ("llama2", 70, 70), ("mistral", 13, 13), ("mistral", 70, 24)],
)
def test_no_token_attends_to_more_than_the_window_that_was_asked_for(
    checkpoint: Callable[[str], Path], tier: TierCase, name: str, asked: int, window: int
) -> None:
    directory = checkpoint(name)
    driver = make_driver(directory, tier, max_attention_window=asked)
    assert driver.info.sliding_window == window
    assert_parity(driver, masked(directory, [window] * 3), tier.block)


@pytest.mark.feature("001-29", "001-30")
@pytest.mark.parametrize("sink_tokens", [0, 1, 4, 33])
@pytest.mark.parametrize(
    ("name", "asked", "windows"),
    [
        ("llama2", 13, [13, 13, 13]),
        ("llama2", (13, 40), [13, 40, 13]),
        ("llama2", (40, 13, 7, 5), [40, 13, 7]),  # there are three layers
        ("llama2", (13, 1000), [13, 1000, 13]),
        ("mistral", (70, 9), [24, 9, 24]),  # its own window is 24 in all
        ("qwen2_window_from_second_layer", None, [None, 13, 13]),  # all are kept for the first layer
        ("qwen2_window_from_second_layer", (40, 70), [40, 13, 13]),
    ],
)
def test_each_layer_has_its_own_window_and_all_of_them_the_sink_tokens(
    checkpoint: Callable[[str], Path],
    tier: TierCase,
    name: str,
    asked: Windows | None,
    windows: list[int | None],
    sink_tokens: int,
) -> None:
    """A block is gone, and NaN, once it has left the widest window that the worker tells of, and holds no sink token."""
    directory = checkpoint(name)
    driver = make_driver(directory, tier, max_attention_window=asked, sink_tokens=sink_tokens)
    assert driver.info.sliding_window == (None if None in windows else max(windows))
    assert_parity(driver, masked(directory, windows, sink_tokens), tier.block)
    gone = driver.tables[0].count(-1)
    first_seen = (
        5 * tier.block + 155 - (driver.info.sliding_window or 10_000)
    )  # of position 5 * block + 154, the last to run
    assert gone == max(0, (first_seen + 1) // tier.block - -(-sink_tokens // tier.block))


@pytest.mark.feature("001-29", "001-30")
@pytest.mark.parametrize("windows, sink_tokens", [(13, 0), ((13, 40), 0), (13, 2)])
def test_windows_and_sink_tokens_are_not_without_effect(
    checkpoint: Callable[[str], Path], tier: TierCase, windows: Windows, sink_tokens: int
) -> None:
    """The same prompt with and without. Up to the 13th token nothing has left a window; from then on all logits differ."""
    tokens = prompt(5 * tier.block)
    logits = []
    for options in (
        dict(),
        dict(max_attention_window=windows, sink_tokens=sink_tokens),
        dict(max_attention_window=windows, sink_tokens=sink_tokens + 1),
    ):
        driver = GroupDriver.of(checkpoint("llama2"), tier, **options)
        driver.begin(0, tokens)
        logits.append(driver.run(0, [len(tokens)]))
    for first, second in ((0, 1), (1, 2)):
        assert_equal(logits[first][:13], logits[second][:13])
        assert (logits[first][15:] - logits[second][15:]).abs().amax(1).min() > 1e-4
