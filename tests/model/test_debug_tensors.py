"""Debug tensors: what a step is given, and what it gives, of the whole batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backend.api import OutputConfig
from backend.api.config.schema import DEBUG_INPUTS, EngineConfig, RecordsConfig
from backend.api.errors import ConfigError
from backend.api.outputs import AdditionalOutput
from backend.api.stats import DebugTensors
from backend.worker import extra_outputs
from backend.worker.debug_tensors import DebugFetch
from tests.model.conftest import Oracle
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.tiers import TORCH, TierCase

PLAIN = OutputConfig()
ALL = (*DEBUG_INPUTS, "logits")


def keeping(directory: Path, tier: TierCase, *names: str, **sections: Any) -> Engine:
    records = dict(debug_tensors=names, max_debug_iterations=100)
    return Engine(engine_config(directory, tier, records=records, **sections))


def told(engine: Engine) -> list[DebugTensors]:
    records = engine.core.take_records()
    return [] if records is None else records.debug_tensors


def numbers(step: DebugTensors, name: str) -> list[Any]:
    data = step.tensors[name]
    assert data.dtype == "int32"
    return np.frombuffer(data.data, dtype=np.int32).reshape(data.shape).tolist()


def test_each_step_tells_its_inputs_and_the_logits_of_a_plain_forward(
    family: tuple[Path, Oracle], tier: TierCase
) -> None:
    """A prompt of 5: step 0 runs it, step i the token at position 4 + i, which sees 5 + i tokens and chooses the next."""
    directory, oracle = family
    engine = keeping(directory, tier, *ALL)
    ids = engine.answer([3, 1, 4, 1, 5], 4, PLAIN).result.output_token_ids[0]
    expected, steps = oracle.logits(ids), told(engine)
    assert [step.iter for step in steps] == [0, 1, 2, 3] and set(steps[0].tensors) == set(ALL)
    assert [numbers(step, "input_ids") for step in steps] == [ids[:5], [ids[5]], [ids[6]], [ids[7]]]
    assert [numbers(step, "position_ids") for step in steps] == [[0, 1, 2, 3, 4], [5], [6], [7]]
    assert [numbers(step, "sequence_length") for step in steps] == [[5], [6], [7], [8]]
    assert [numbers(step, "host_past_key_value_lengths") for step in steps] == [[0], [5], [6], [7]]
    assert {tuple(numbers(step, "slots")) for step in steps} == {(numbers(steps[0], "slots")[0],)}
    assert [steps[i].tensors["block_tables"].shape for i in (0, 3)] == [
        (1, -(-5 // tier.block)),
        (1, -(-8 // tier.block)),
    ]
    logits = torch.cat([tensor_of(step.tensors["logits"]) for step in steps])
    torch.testing.assert_close(logits.log_softmax(-1), expected[4:8].log_softmax(-1), atol=1e-4, rtol=1e-4)
    assert told(engine) == []


def test_rows_lie_one_after_the_other_and_those_that_do_not_sample_have_no_logits(
    checkpoint: Callable[[str], Path], tier: TierCase
) -> None:
    """Steps of 8 tokens. Step 0: all 3 of A, 5 of B's 12. Step 1: one of A, B's last 7. Then one of each, and B alone."""
    engine = keeping(checkpoint("llama2"), tier, *ALL, scheduler={"max_num_tokens": 8, "mixed_context_tokens": 8})
    short, long = [1, 2, 3], list(range(10, 22))
    for prompt in (short, long):
        engine.ask(prompt, 3, PLAIN)
    engine.run()
    first, second, third, fourth = told(engine)
    assert numbers(first, "input_ids") == [*short, *long[:5]] and first.tensors["logits"].shape[0] == 1
    assert numbers(second, "sequence_length") == [4, 12] and second.tensors["logits"].shape[0] == 2
    assert numbers(second, "input_ids")[1:] == long[5:] and numbers(second, "position_ids") == [3, *range(5, 12)]
    assert numbers(fourth, "sequence_length") == [14] and numbers(third, "sequence_length") == [5, 13]
    assert len(set(numbers(third, "slots"))) == 2


def test_a_step_in_which_nobody_samples_has_inputs_only(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    engine = keeping(checkpoint("llama2"), tier, "logits", "input_ids", scheduler={"max_num_tokens": 4})
    engine.answer([1, 2, 3, 4, 5, 6], 1, PLAIN)
    assert [set(step.tensors) for step in told(engine)] == [{"input_ids"}, {"input_ids", "logits"}]


def test_other_outputs_of_the_model_are_those_that_a_request_gets(checkpoint: Callable[[str], Path]) -> None:
    engine = keeping(checkpoint("llama2"), TORCH, "hidden_states", model={"additional_outputs": ("hidden_states",)})
    own = engine.answer([1, 2, 3], 3, OutputConfig(additional_outputs=(AdditionalOutput("hidden_states"),))).result
    rows = torch.cat([tensor_of(step.tensors["hidden_states"]) for step in told(engine)])
    torch.testing.assert_close(rows, tensor_of(own.additional_outputs["hidden_states"])[0], atol=0, rtol=0)


@pytest.mark.parametrize("max_rows", [16, 256])
def test_the_logits_are_there_beside_those_of_a_prompt_that_a_request_gets(
    checkpoint: Callable[[str], Path], tier: TierCase, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """The prompt's 40 rows come in passes of 16, or in one. Its last row is the one that samples, and the inputs are of all."""
    monkeypatch.setattr(extra_outputs, "MAX_ROWS", max_rows)
    engine = keeping(
        checkpoint("llama2"),
        tier,
        "logits",
        "input_ids",
    )
    prompt = [(7 * i) % 120 for i in range(40)]
    own = engine.answer(prompt, 1).result
    (step,) = told(engine)
    assert numbers(step, "input_ids") == prompt
    torch.testing.assert_close(tensor_of(step.tensors["logits"]), tensor_of(own.context_logits)[-1:], atol=0, rtol=0)


def test_what_does_not_fit_is_dropped_and_the_log_names_the_limit_once(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """input_ids of the prompt take 3 * 4 = 12 bytes, of a token 4; logits take 4 for each of the vocabulary's ids, which are more
    than 3.
    """
    engine = keeping(checkpoint("llama2"), TORCH, "logits", "input_ids", limits={"max_tensor_bytes": 12})
    with caplog.at_level(logging.WARNING):
        engine.answer([1, 2, 3], 3, PLAIN)
    assert [set(step.tensors) for step in told(engine)] == [{"input_ids"}] * 3
    (message,) = [record.getMessage() for record in caplog.records if "debug tensor" in record.getMessage()]
    assert "logits takes" in message and "room for 12 (limits.max_tensor_bytes)" in message


@pytest.mark.parametrize(
    "records", [RecordsConfig(), RecordsConfig(debug_tensors=ALL), RecordsConfig(max_debug_iterations=5)]
)
def test_nothing_is_fetched_unless_both_names_and_a_number_are_given(records: RecordsConfig) -> None:
    assert DebugFetch.of(EngineConfig(records=records)) is None


def test_a_tensor_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="has 'hidden_states'; there are input_ids, .*model.additional_outputs"):
        DebugFetch.of(EngineConfig(records=RecordsConfig(debug_tensors=("logits", "hidden_states"))))
