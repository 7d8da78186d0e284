"""Logits processors, logits and other tensors of the model, through LLM over a real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.api import ConfigError, EngineConfig
from backend.api.config.schema import ModelConfigSection
from compat.llm import (
    LLM,
    AdditionalModelOutput,
    BatchedLogitsProcessor,
    GenerationExecutor,
    LogitsProcessor,
    NotHere,
    RequestError,
    SamplingParams,
)

PROMPT = [5, 90, 17, 200]
NEW = 5
TOLERANCE = 1e-4  # float32, sums in another order


def asked(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NEW, ignore_eos=True, **fields)


def force(token_id: int, logits: torch.Tensor) -> None:
    logits.fill_(-torch.inf)
    logits[..., token_id] = 0.0


class Force(LogitsProcessor):
    """Forces a token, and keeps what it is told."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, req_id, logits, token_ids, stream_ptr, client_id) -> None:  # noqa: ANN001
        self.calls.append((req_id, tuple(logits.shape), [list(ids) for ids in token_ids], stream_ptr, client_id))
        force(self.token_id, logits)


class ForceAll(BatchedLogitsProcessor):
    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, req_ids, logits, token_ids, stream_ptr, client_ids) -> None:  # noqa: ANN001
        assert stream_ptr is None and len(logits) == len(token_ids) == len(client_ids) == len(req_ids)
        self.calls.append(req_ids)
        for each in logits:
            force(42, each)


def forty_two(req_ids, logits, token_ids, stream_ptr, client_ids) -> None:  # noqa: ANN001
    """Stands at the top of a module, so that an engine process can import it."""
    for each in logits:
        force(42, each)


@pytest.fixture(scope="module")
def batched(model_dir: Path) -> Iterator[tuple[LLM, ForceAll]]:
    processor = ForceAll()
    config = EngineConfig(
        model=ModelConfigSection(kernels="torch", dtype="float32", additional_outputs=("hidden_states",))
    )
    with LLM(model_dir, batched_logits_processor=processor, engine_config=config) as llm:
        yield llm, processor


@pytest.mark.feature("002-14")
def test_a_processor_changes_its_own_request_and_is_told_of_it(llm: LLM) -> None:
    plain = llm.generate(PROMPT, asked()).outputs[0].token_ids
    seven = Force(7)
    results = [llm.generate_async(PROMPT, asked(logits_processor=each)) for each in (seven, None)]
    assert [result.result().outputs[0].token_ids for result in results] == [[7] * NEW, plain]
    number, vocab_size = results[0].request_id, 32_000
    known = [PROMPT + [7] * n for n in range(NEW)]
    assert seven.calls == [(number, (1, 1, vocab_size), [ids], None, number) for ids in known]
    assert len(llm.executor._processors) == 0, "nothing is kept of requests that are over"


@pytest.mark.feature("002-14")
def test_a_list_of_processors_runs_in_its_order_and_a_function_may_return_logits(llm: LLM) -> None:
    def reverse(req_id: int, logits: torch.Tensor, token_ids: Any, stream: Any, client_id: Any) -> torch.Tensor:
        return -logits

    def keep_two(req_id: int, logits: torch.Tensor, token_ids: Any, stream: Any, client_id: Any) -> None:
        """After the other: 9 comes first of these two, because its logit is no longer reversed."""
        logits.fill_(-torch.inf)
        logits[..., 9], logits[..., 8] = 1.0, 0.0

    for processors, token_id in (([reverse, keep_two], 9), ([keep_two, reverse], None)):
        ids = llm.generate(PROMPT, asked(logits_processor=processors)).outputs[0].token_ids
        assert (ids == [9] * NEW) == (token_id == 9)
    with pytest.raises(ValueError, match="logits_processor holds a int, which cannot be called"):
        llm.generate(PROMPT, asked(logits_processor=[3]))


def test_a_processor_that_raises_ends_its_request_alone(llm: LLM) -> None:
    def broken(*arguments: Any) -> None:
        raise KeyError("x")

    results = [llm.generate_async(PROMPT, asked(logits_processor=each)) for each in (broken, Force(3))]
    with pytest.raises(RequestError, match="KeyError"):
        results[0].result()
    assert results[1].result().outputs[0].token_ids == [3] * NEW


@pytest.mark.feature("002-14")
def test_the_batched_processor_is_for_those_who_ask(batched: tuple[LLM, ForceAll]) -> None:
    llm, processor = batched
    which = [asked(apply_batched_logits_processor=True), asked(), asked(apply_batched_logits_processor=True)]
    outputs = llm.generate([PROMPT] * 3, which)
    ids = [output.outputs[0].token_ids for output in outputs]
    assert ids[0] == ids[2] == [42] * NEW != ids[1]
    wanted = {outputs[0].request_id, outputs[2].request_id}
    assert {number for call in processor.calls for number in call} == wanted


def test_without_a_batched_processor_and_with_both_kinds_it_is_refused(llm: LLM) -> None:
    with pytest.raises(
        ValueError, match="apply_batched_logits_processor is set, and there is no batched_logits_processor"
    ):
        llm.generate(PROMPT, asked(apply_batched_logits_processor=True))
    with pytest.raises(ValueError, match="are both set"):
        llm.generate(PROMPT, asked(apply_batched_logits_processor=True, logits_processor=Force(1)))


def test_an_engine_process_runs_what_it_can_import(model_dir: Path) -> None:
    with GenerationExecutor.create(str(model_dir), batched_logits_processor=forty_two, world_size=2) as executor:
        assert executor.generate(PROMPT, asked(apply_batched_logits_processor=True)).token_ids == [42] * NEW
        with pytest.raises(NotHere, match="logits_processor is set, and the engine is not in this process"):
            executor.generate(PROMPT, asked(logits_processor=Force(1)))
    with pytest.raises(ConfigError, match="define it at the top of a module, or let the engine run in this process"):
        LLM(model_dir, batched_logits_processor=ForceAll(), orchestrator_type="rpc")


@pytest.mark.feature("002-13")
@torch.inference_mode()
@pytest.mark.parametrize("streaming", [False, True])
def test_logits_are_those_of_a_plain_forward(llm: LLM, model_dir: Path, streaming: bool) -> None:
    """The prompt is no other test's, so that no KV of it is found, and all of its rows are there."""
    prompt = [11 + streaming, *PROMPT]
    params = asked(return_context_logits=True, return_generation_logits=True)
    result = llm.generate_async(prompt, params, streaming=streaming)
    if streaming:
        first = next(result)
        assert first.context_logits.shape[0] == len(prompt) and first.outputs[0].generation_logits.shape[0] == 1
    output = result.result().outputs[0]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = model(torch.tensor([prompt + output.token_ids])).logits[0]
    torch.testing.assert_close(result.context_logits, rows[: len(prompt)], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(output.generation_logits, rows[len(prompt) - 1 : -1], atol=TOLERANCE, rtol=TOLERANCE)
    plain = llm.generate(prompt, asked())
    assert plain.context_logits is None and plain.outputs[0].generation_logits is None


def test_rows_of_what_a_stop_string_has_cut_off_are_gone(llm: LLM) -> None:
    """The forced token 40 is one character; four of them hold the stop string, which begins with the third."""
    piece = llm.tokenizer.decode([40])
    params = asked(
        logits_processor=Force(40),
        stop=piece * 4,
        min_tokens=1,
        return_generation_logits=True,
    )
    output = llm.generate(PROMPT, params).outputs[0]
    assert output.finish_reason == "stop" and len(output.generation_logits) == len(output.token_ids) == 0


def test_outputs_that_the_model_marks(batched: tuple[LLM, ForceAll]) -> None:
    llm, _ = batched
    wanted = [AdditionalModelOutput("hidden_states", gather_context=True)]
    output = llm.generate(PROMPT, asked(additional_model_outputs=wanted)).outputs[0]
    hidden = output.additional_generation_outputs["hidden_states"]
    assert hidden.shape[0] == NEW and output.additional_context_outputs["hidden_states"].shape[1] == hidden.shape[1]
    without = llm.generate([7, 8, 9], asked(additional_model_outputs=[AdditionalModelOutput("hidden_states")]))
    assert without.outputs[0].additional_context_outputs is None
    with pytest.raises(RequestError, match="additional output 'zzz' is not known, there are: hidden_states"):
        llm.generate(PROMPT, asked(additional_model_outputs=[AdditionalModelOutput("zzz")]))
    with pytest.raises(RequestError, match="return_context_logits needs model.gather_context_logits, which is off"):
        llm.generate(PROMPT, asked(return_context_logits=True))
