"""Outputs that the model marks besides its tokens: hidden states, logits, and what a toy model marks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from backend.api import AdditionalOutput, ConfigError, ErrorCode, OutputConfig
from backend.models import decoder
from tests.model.conftest import Oracle
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.tiers import NATIVE, TORCH, TierCase

PROMPT = [(5 * i) % 120 for i in range(21)]
HIDDEN = {"gather_context_logits": False, "gather_generation_logits": False, "additional_outputs": ("hidden_states",)}
Checkpoint = Callable[[str], Path]


def asking(*names: str, context: bool = False) -> OutputConfig:
    return OutputConfig(additional_outputs=tuple(AdditionalOutput(name, context) for name in names))


@torch.inference_mode()
def hidden_states(oracle: Oracle, tokens: list[int]) -> Tensor:
    """What the last layer gives to lm_head, [tokens, hidden]."""
    return oracle.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.feature("000-51", "000-53")
@pytest.mark.parametrize("context", [False, True])
def test_hidden_states_equal_a_plain_forward_with_context_rows_only_if_asked_for(
    family: tuple[Path, Oracle], tier: TierCase, context: bool
) -> None:
    directory, oracle = family
    result = (
        Engine(engine_config(directory, tier, model=HIDDEN))
        .answer(PROMPT, 5, asking("hidden_states", context=context))
        .result
    )
    expected = hidden_states(oracle, result.output_token_ids[0])
    own = result.additional_outputs["hidden_states"]
    assert own.shape == (1, 5, expected.shape[1])
    torch.testing.assert_close(tensor_of(own)[0], expected[len(PROMPT) - 1 : -1], atol=1e-4, rtol=1e-4)
    assert result.context_logits is None and result.generation_logits is None
    if context:
        rows = tensor_of(result.additional_context_outputs["hidden_states"])
        torch.testing.assert_close(rows, expected[: len(PROMPT)], atol=1e-4, rtol=1e-4)
    else:
        assert result.additional_context_outputs == {}


@pytest.mark.feature("000-53")
def test_logits_are_an_output_like_others(checkpoint: Checkpoint, tier: TierCase) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), tier, model={"additional_outputs": ("logits",)}))
    output = OutputConfig(
        additional_outputs=(AdditionalOutput("logits", True),),
        return_context_logits=True,
        return_generation_logits=True,
    )
    result = engine.answer(PROMPT, 3, output).result
    assert result.additional_outputs == {"logits": result.generation_logits}
    assert result.additional_context_outputs == {"logits": result.context_logits}


@pytest.mark.feature("000-50")
def test_only_the_request_that_asks_gets_them_and_unknown_names_are_refused(checkpoint: Checkpoint) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), TORCH, model=HIDDEN))
    asks, asks_not = engine.ask(PROMPT, 3, asking("hidden_states")), engine.ask(PROMPT, 3, OutputConfig())
    refused = engine.ask(PROMPT, 3, asking("hidden_states", "router"))
    twice = engine.ask(PROMPT, 3, asking("hidden_states", "hidden_states"))
    engine.run()
    assert list(engine.responses[asks][-1].result.additional_outputs) == ["hidden_states"]
    assert engine.responses[asks_not][-1].result.additional_outputs is None
    (error,) = engine.responses[refused]
    assert error.error_code is ErrorCode.INVALID_ARGUMENT
    assert error.error_msg == (
        "additional output 'router' is not known, there are: hidden_states (model.additional_outputs)"
    )
    assert engine.responses[twice][0].error_msg == "an additional output is named twice; name each once"


@pytest.mark.feature("000-52")
def test_rows_of_reused_kv_are_absent(checkpoint: Checkpoint) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), TORCH, model=HIDDEN))
    first, second = (
        engine.answer(PROMPT, 2, asking("hidden_states", context=True)).result.additional_context_outputs[
            "hidden_states"
        ]
        for _ in range(2)
    )
    assert (first.shape[0], second.shape[0]) == (21, 1)
    torch.testing.assert_close(tensor_of(second), tensor_of(first)[-1:], atol=1e-5, rtol=1e-5)


@pytest.mark.feature("000-48")
def test_a_toy_model_marks_its_own_output(
    checkpoint: Checkpoint, tier: TierCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = decoder.Decoder.__post_init__

    def mark_more(self: decoder.Decoder) -> None:
        mark(self)
        self.outputs["TopKLogits"] = decoder.MarkedOutput(4, lambda hidden, logits: logits.topk(4).values)

    monkeypatch.setattr(decoder.Decoder, "__post_init__", mark_more)
    model: dict[str, Any] = {"additional_outputs": ("TopKLogits", "logits")}
    engine = Engine(engine_config(checkpoint("llama2"), tier, model=model))
    result = engine.answer(PROMPT, 3, asking("TopKLogits", "logits")).result
    expected = tensor_of(result.additional_outputs["logits"]).topk(4).values
    assert torch.equal(tensor_of(result.additional_outputs["TopKLogits"]), expected)


@pytest.mark.feature("000-48")
def test_an_output_that_the_model_does_not_mark_is_refused_at_construction(checkpoint: Checkpoint) -> None:
    config = engine_config(checkpoint("llama2"), TORCH, model={"additional_outputs": ("TopKLogits",)})
    with pytest.raises(ConfigError) as caught:
        Engine(config)
    assert str(caught.value) == (
        "model.additional_outputs has 'TopKLogits', which the model does not mark as an output; it marks hidden_states, logits"
    )


def test_hidden_states_of_a_bfloat16_model_are_those_that_its_head_reads(
    checkpoint: Checkpoint, native_kernels: None
) -> None:
    config = engine_config(checkpoint("llama2"), NATIVE, model={**HIDDEN, "gather_generation_logits": True})
    engine = Engine(replace(config, model=replace(config.model, dtype="bfloat16")))
    output = replace(asking("hidden_states"), return_generation_logits=True)
    result = engine.answer(PROMPT, 4, output).result
    head = load_file(checkpoint("llama2") / "model.safetensors")["lm_head.weight"].bfloat16().float()
    hidden = tensor_of(result.additional_outputs["hidden_states"])[0]
    expected = hidden.bfloat16().float() @ head.T
    torch.testing.assert_close(tensor_of(result.generation_logits)[0], expected, atol=1e-4, rtol=1e-4)
