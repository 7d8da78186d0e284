"""Logits, additional outputs and post-processors of beam searches: each hypothesis has its own, whatever row computed it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.api import AdditionalOutput, OutputConfig, Request, Result, SamplingConfig
from backend.api.request import RequestId
from backend.core.sequence import BeamSequence, Event
from backend.core.step import GatheredRows, SampledToken, SequenceId, SlotId
from backend.worker.post_processors import PostProcessors
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.processors import force_42
from tests.model.tiers import TierCase

PROMPT = [(5 * i) % 120 for i in range(13)]
NEW, WIDTH = 7, 3
BEAMS = SamplingConfig(beam_width=WIDTH)
LOGITS = OutputConfig(return_context_logits=True, return_generation_logits=True)
Checkpoint = Callable[[str], Path]


def outputs(result: Result) -> list[list[int]]:
    return [tokens[len(PROMPT) :] for tokens in result.output_token_ids]


def assert_close(own: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.feature("001-52")
@pytest.mark.parametrize("evict", [False, True])
def test_generation_logits_are_those_of_each_hypothesis(checkpoint: Checkpoint, tier: TierCase, evict: bool) -> None:
    """[beams, longest output, vocabulary]. A hypothesis forks, ends early, and loses its KV; its rows go with it."""
    small_steps = (
        {"max_num_tokens": 16} if evict else {}
    )  # a beam has its candidates while others are still computed again
    engine = Engine(engine_config(checkpoint("llama2"), tier, reuse=False, scheduler=small_steps))
    plain = engine.answer(PROMPT, NEW, OutputConfig(), sampling_config=BEAMS).result
    request_id = engine.ask(PROMPT, NEW, LOGITS, sampling_config=BEAMS, end_ids=(outputs(plain)[0][4],))
    engine.run(evict)
    result = engine.responses[request_id][-1].result
    found = outputs(result)
    assert len({tuple(tokens) for tokens in found}) == WIDTH and len({len(tokens) for tokens in found}) > 1
    own = tensor_of(result.generation_logits)
    assert own.shape[:2] == (WIDTH, max(map(len, found)))
    for beam, tokens in enumerate(found):
        alone = engine.answer([*PROMPT, *tokens], 1, LOGITS).result
        expected = tensor_of(alone.context_logits)
        assert_close(own[beam, : len(tokens)], expected[len(PROMPT) - 1 : -1])
        assert not own[beam, len(tokens) :].any()
        assert_close(tensor_of(result.context_logits), expected[: len(PROMPT)])


def test_a_paused_row_gives_back_the_logits_of_candidates_that_it_loses() -> None:
    """It samples from the same position again when it returns, which gives these logits once more."""
    request = Request([1, 2], 4, sampling_config=BEAMS, output_config=LOGITS)
    row = BeamSequence(SequenceId(1), RequestId(1), request, 0, 0)
    row.apply(Event.ADMIT)
    assert row.gathered is not None
    for number in (5, 6):
        row.gathered.add(GatheredRows(0, "logits", False, number, 1, bytes([number] * 4)))
    row.token_ids.append(7)
    row.candidates = SampledToken(SlotId(0), 8)
    row.apply(Event.PAUSE)
    tensor = row.gathered.fork().take(request)["generation_logits"]
    assert row.candidates is None and (tensor.shape, tensor.data) == ((1, 1, 1), bytes([5] * 4))


@pytest.mark.feature("001-52")
def test_a_streaming_search_gives_its_logits_with_the_last_response(checkpoint: Checkpoint, tier: TierCase) -> None:
    """Until then a hypothesis may still be replaced by another one."""
    engine = Engine(engine_config(checkpoint("llama2"), tier, reuse=False))
    whole = engine.answer(PROMPT, NEW, LOGITS, sampling_config=BEAMS).result
    *parts, last = [response.result for response in engine.responses[_streamed(engine)]]
    assert len(parts) == NEW - 1 and all(part.generation_logits is None for part in parts)
    assert_close(tensor_of(last.generation_logits), tensor_of(whole.generation_logits))


def _streamed(engine: Engine) -> int:
    request_id = engine.ask(PROMPT, NEW, LOGITS, sampling_config=BEAMS, streaming=True)
    engine.run()
    return request_id


@pytest.mark.feature("000-53")
def test_additional_outputs_are_those_of_each_hypothesis(checkpoint: Checkpoint, tier: TierCase) -> None:
    engine = Engine(
        engine_config(checkpoint("llama2"), tier, reuse=False, model={"additional_outputs": ("hidden_states",)})
    )
    asked = OutputConfig(additional_outputs=(AdditionalOutput("hidden_states", True),))
    result = engine.answer(PROMPT, NEW, asked, sampling_config=BEAMS).result
    own = tensor_of(result.additional_outputs["hidden_states"])
    assert own.shape[:2] == (WIDTH, NEW)
    for beam, tokens in enumerate(result.output_token_ids):
        alone = engine.answer(tokens[:-1], 1, asked).result
        of_prompt = tensor_of(alone.additional_context_outputs["hidden_states"])
        torch.testing.assert_close(own[beam], of_prompt[len(PROMPT) - 1 :], atol=1e-3, rtol=1e-3)
    context = tensor_of(result.additional_context_outputs["hidden_states"])
    assert len(context) == len(PROMPT)


class Watching:
    """A post-processor, named or batched, that bans tokens and keeps what it is called with."""

    def __init__(self, banned: list[int]) -> None:
        self.banned = banned
        self.calls: list[list[tuple[int, tuple[int, ...], list[list[int]], int | None]]] = []

    def one(self, request_id: int, logits: Tensor, ids: list[list[int]], stream: int, client_id: int | None) -> None:
        self.batch([request_id], [logits], [ids], stream, [client_id])

    def batch(self, request_ids: list[int], logits: list[Tensor], ids: Any, stream: int, client_ids: list[Any]) -> None:
        shapes = [tuple(each.shape[:2]) for each in logits]
        self.calls.append(list(zip(request_ids, shapes, ids, client_ids, strict=True)))
        for each in logits:
            each[..., self.banned] = -1e9


@pytest.mark.feature("000-36", "000-39")
@pytest.mark.parametrize("name", ["mine", Request.BATCHED_POST_PROCESSOR_NAME])
def test_a_post_processor_is_called_once_a_step_with_the_tokens_of_each_beam(
    checkpoint: Checkpoint, tier: TierCase, name: str
) -> None:
    config = engine_config(checkpoint("llama2"), tier)
    plain = Engine(config).answer(PROMPT, NEW, OutputConfig(), sampling_config=BEAMS).result
    watching = Watching(sorted({token for tokens in outputs(plain) for token in tokens}))
    engine = Engine(config, PostProcessors({"mine": watching.one}, watching.batch))
    expected = engine.answer(
        PROMPT, NEW, OutputConfig(), sampling_config=BEAMS, bad_words=[[token] for token in watching.banned]
    ).result
    fields = {"sampling_config": BEAMS, "logits_post_processor": name, "client_id": 5}
    result = engine.answer(PROMPT, NEW, OutputConfig(), **fields).result
    assert outputs(result) != outputs(plain)
    assert not {token for tokens in outputs(result) for token in tokens} & set(watching.banned)
    assert len(expected.output_token_ids) == len(result.output_token_ids) == WIDTH
    assert len(watching.calls) == NEW and all(len(call) == 1 for call in watching.calls)
    for step, ((request_id, shape, ids, client_id),) in enumerate(watching.calls):
        beams = WIDTH if step else 1  # the prompt is one hypothesis
        assert (request_id, shape, client_id) == (2, (1, beams), 5)
        assert len({tuple(tokens) for tokens in ids}) == beams
        assert all(tokens[: len(PROMPT)] == PROMPT and len(tokens) == len(PROMPT) + step for tokens in ids)


@pytest.mark.feature("000-39")
def test_searches_and_single_sequences_share_a_call_of_the_batched_one(checkpoint: Checkpoint, tier: TierCase) -> None:
    """Beams never share a step with other widths, so two searches of one width do, and each has an entry."""
    watching = Watching([])
    engine = Engine(
        engine_config(checkpoint("llama2"), tier, scheduler={"max_batch_size": 6}), PostProcessors(None, watching.batch)
    )
    fields = {"sampling_config": BEAMS, "logits_post_processor": Request.BATCHED_POST_PROCESSOR_NAME}
    for prompt in (PROMPT, PROMPT[::-1]):
        engine.ask(prompt, NEW, OutputConfig(), **fields)
    engine.run()
    together = [call for call in watching.calls if len(call) == 2]
    assert together and all([entry[0] for entry in call] == [1, 2] for call in together)
    for call in together:
        for (_, _, ids, _), prompt in zip(call, (PROMPT, PROMPT[::-1]), strict=True):
            assert all(tokens[: len(PROMPT)] == prompt for tokens in ids)


def test_a_forced_token_leaves_one_hypothesis(checkpoint: Checkpoint, tier: TierCase) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), tier), PostProcessors({"mine": force_42}))
    result = engine.answer(PROMPT, 4, OutputConfig(), sampling_config=BEAMS, logits_post_processor="mine").result
    assert outputs(result) == [[42] * 4]


def test_a_post_processor_that_fails_for_beams_ends_their_request_alone(
    checkpoint: Checkpoint, tier: TierCase, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(request_id: int, logits: Tensor, ids: list[list[int]], stream: int, client_id: int | None) -> None:
        if len(ids) == WIDTH and len(ids[0]) > len(PROMPT) + 2:
            raise KeyError("gone")

    engine = Engine(
        engine_config(checkpoint("llama2"), tier, scheduler={"max_batch_size": 6}), PostProcessors({"mine": fails})
    )
    expected = engine.answer(PROMPT, NEW, OutputConfig(), sampling_config=BEAMS).result
    failing = engine.ask(PROMPT, NEW, OutputConfig(), sampling_config=BEAMS, logits_post_processor="mine")
    other = engine.ask(PROMPT, NEW, OutputConfig(), sampling_config=BEAMS)
    engine.run()
    assert "post-processor 'mine' failed (KeyError)" in engine.responses[failing][-1].error_msg
    assert engine.responses[other][-1].result.output_token_ids == expected.output_token_ids
