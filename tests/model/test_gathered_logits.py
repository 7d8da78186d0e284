"""Context and generation logits: equal to a plain forward, each position once, whatever became of the KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from backend.api import ErrorCode, OutputConfig, SamplingConfig, SessionConfig
from tests.model.conftest import Oracle
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.tiers import NATIVE, TORCH, TierCase

PROMPTS = [[(7 * i + 3 * n) % 120 for i in range(length)] for n, length in enumerate((5, 31, 64, 70))]
CONTEXT = OutputConfig(return_context_logits=True)
NEW = 6


@pytest.mark.feature("001-51", "001-52", "000-53")
def test_logits_equal_a_plain_forward(family: tuple[Path, Oracle], tier: TierCase) -> None:
    directory, oracle = family
    engine = Engine(engine_config(directory, tier))
    for prompt in PROMPTS:
        result = engine.answer(prompt, NEW).result
        expected = oracle.logits(result.output_token_ids[0])
        assert result.context_logits.shape == (len(prompt), expected.shape[1])
        assert result.generation_logits.shape == (1, NEW, expected.shape[1])
        torch.testing.assert_close(tensor_of(result.context_logits), expected[: len(prompt)], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            tensor_of(result.generation_logits)[0], expected[len(prompt) - 1 : -1], atol=1e-4, rtol=1e-4
        )


@pytest.mark.feature("000-54")
@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33])
def test_the_last_row_is_there_for_every_length(checkpoint: Callable[[str], Path], tier: TierCase, length: int) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), tier, reuse=False))
    result = engine.answer([9, 8, 7], length).result
    again = engine.answer(result.output_token_ids[0][:-1], 1).result
    last = tensor_of(result.generation_logits)[0]
    assert len(last) == length
    torch.testing.assert_close(last[-1], tensor_of(again.generation_logits)[0, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last, tensor_of(again.context_logits)[2:], atol=1e-5, rtol=1e-5)


@pytest.mark.feature("000-14")
def test_what_was_not_asked_for_is_not_there(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), tier))
    ids = [
        engine.ask(PROMPTS[0], 3, OutputConfig(return_context_logits=context, return_generation_logits=generation))
        for context in (False, True)
        for generation in (False, True)
    ]
    engine.run()
    results = [engine.responses[request_id][-1].result for request_id in ids]
    assert [result.generation_logits is not None for result in results] == [False, True] * 2
    assert [result.context_logits is not None for result in results[:2]] == [False, False]
    assert results[2].context_logits is not None


@pytest.mark.parametrize("evict", [False, True])
def test_batches_chunks_and_evictions_leave_every_row_as_it_was_and_give_it_once(
    checkpoint: Callable[[str], Path], tier: TierCase, evict: bool
) -> None:
    alone = Engine(engine_config(checkpoint("qwen3"), tier, reuse=False))
    expected = [alone.answer(prompt, NEW).result for prompt in PROMPTS]
    small = {"max_chunk_tokens": 11, "max_num_tokens": 24, "max_context_tokens": 24, "policy": "max_utilization"}
    crowd = Engine(engine_config(checkpoint("qwen3"), tier, reuse=False, scheduler=small))
    sampled = SamplingConfig(temperature=0.9, seed=3)
    ids = [crowd.ask(prompt, NEW) for prompt in PROMPTS[:2]]
    crowd.ask([1, 2, 3], 9, OutputConfig(), sampling_config=sampled)  # asks for nothing
    ids += [crowd.ask(prompt, NEW) for prompt in PROMPTS[2:]]
    crowd.run(evict)
    for request_id, mine in zip(ids, expected, strict=True):
        got = crowd.responses[request_id][-1].result
        assert got.output_token_ids == mine.output_token_ids
        for name in ("context_logits", "generation_logits"):
            ours, theirs = tensor_of(getattr(got, name)), tensor_of(getattr(mine, name))
            assert ours.shape == theirs.shape
            if tier is NATIVE:
                assert torch.equal(ours, theirs), name
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert bool(crowd.core.counters.recomputed_tokens_total) == evict


@pytest.mark.parametrize("evict", [False, True])
def test_a_stream_gives_context_rows_first_and_then_a_row_for_each_token(
    checkpoint: Callable[[str], Path], tier: TierCase, evict: bool
) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), tier, reuse=False, scheduler={"max_chunk_tokens": 20}))
    whole = engine.answer(PROMPTS[2], NEW).result
    request_id = engine.ask(PROMPTS[2], NEW, streaming=True)
    engine.run(evict)
    parts = [response.result for response in engine.responses[request_id]]
    assert [part.context_logits is not None for part in parts] == [True] + [False] * (NEW - 1)
    rows = torch.cat([tensor_of(part.generation_logits) for part in parts], dim=1)
    torch.testing.assert_close(rows, tensor_of(whole.generation_logits), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        tensor_of(parts[0].context_logits), tensor_of(whole.context_logits), atol=1e-5, rtol=1e-5
    )


@pytest.mark.feature("000-52")
def test_rows_of_reused_kv_are_absent_and_the_others_are_the_prompts_last(
    checkpoint: Callable[[str], Path], tier: TierCase
) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), tier))
    first = engine.answer(PROMPTS[3], 2).result
    second = engine.answer(PROMPTS[3], 2).result
    reused = (len(PROMPTS[3]) - 1) // tier.block * tier.block
    assert reused > 0
    assert second.context_logits.shape[0] == len(PROMPTS[3]) - reused
    torch.testing.assert_close(
        tensor_of(second.context_logits), tensor_of(first.context_logits)[reused:], atol=1e-5, rtol=1e-5
    )
    assert second.generation_logits.shape == first.generation_logits.shape


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_each_sequence_of_a_request_has_the_context_rows_of_the_whole_prompt(
    checkpoint: Callable[[str], Path], tier: TierCase, streaming: bool, evict: bool
) -> None:
    """Only the first one computes the prompt."""
    engine = Engine(engine_config(checkpoint("llama2"), tier, reuse=False, scheduler={"max_chunk_tokens": 20}))
    alone = engine.answer(PROMPTS[2], 1, CONTEXT).result
    sampling = SamplingConfig(temperature=1.0, seed=5, num_return_sequences=3)
    request_id = engine.ask(PROMPTS[2], NEW, CONTEXT, streaming=streaming, sampling_config=sampling)
    engine.run(evict)
    told = [response.result for response in engine.responses[request_id] if response.result.context_logits is not None]
    assert sorted(result.sequence_index for result in told) == [0, 1, 2]
    for result in told:
        torch.testing.assert_close(
            tensor_of(result.context_logits), tensor_of(alone.context_logits), atol=1e-5, rtol=1e-5
        )


def test_a_prompt_without_output_gives_its_context_logits(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    result = Engine(engine_config(checkpoint("llama2"), tier)).answer(PROMPTS[1], 0).result
    assert result.context_logits.shape[0] == len(PROMPTS[1]) and result.generation_logits is None


@pytest.mark.feature("001-55")
@pytest.mark.parametrize("kind", ["context", "generation"])
def test_a_flag_that_is_off_refuses_by_name(checkpoint: Callable[[str], Path], kind: str) -> None:
    config = engine_config(checkpoint("llama2"), TORCH, model={f"gather_{kind}_logits": False})
    answer = Engine(config).answer(PROMPTS[0], 2)
    assert answer.error_code is ErrorCode.UNSUPPORTED
    key = f"model.gather_{kind}_logits"
    assert answer.error_msg == f"return_{kind}_logits needs {key}, which is off; start the engine with --set {key}=true"


@pytest.mark.feature("001-67")
def test_tensors_beyond_the_caps_are_refused_with_the_figures(checkpoint: Callable[[str], Path]) -> None:
    probe = Engine(engine_config(checkpoint("llama2"), TORCH))
    row = 4 * probe.core.model.vocab_size
    limits = {"max_tensor_bytes": 20 * row, "max_live_tensor_bytes": 40 * row}
    engine = Engine(engine_config(checkpoint("llama2"), TORCH, limits=limits))
    prompt = list(range(15))
    error = engine.answer(prompt, 6)
    assert error.error_code is ErrorCode.INVALID_ARGUMENT
    assert error.error_msg == (
        f"the tensors asked for take up to {21 * row} bytes of one response (15 prompt tokens, 6 output tokens), the limit is "
        f"{20 * row} (limits.max_tensor_bytes); ask for fewer tokens, or let it stream"
    )
    assert engine.answer(prompt, 5).result.generation_logits is not None
    assert engine.answer(prompt, 6, streaming=True).result.generation_logits is not None
    assert "the limit of all requests together is" in engine.answer(prompt, 26, streaming=True).error_msg
    accepted = [engine.ask(prompt, 5) for _ in range(2)]
    refused = engine.ask([3], 1, CONTEXT)
    assert engine.responses[refused][0].error_code is ErrorCode.UNAVAILABLE
    assert f"{40 * row} are promised to others" in engine.responses[refused][0].error_msg
    engine.run()
    assert all(engine.responses[request_id][-1].result.context_logits for request_id in accepted)
    assert not engine.answer([3], 1, CONTEXT).has_error(), "the room is free again"


def test_a_session_gives_the_rows_of_its_turns_prompt_only(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), tier))
    first = engine.answer(PROMPTS[1], 3, session=SessionConfig(1, start=True)).result
    second = engine.answer([4, 5, 6], 2, session=SessionConfig(1)).result
    assert second.context_logits.shape[0] == 3
    history = first.output_token_ids[0]
    plain = Engine(engine_config(checkpoint("llama2"), tier)).answer([*history, 4, 5, 6], 2).result
    torch.testing.assert_close(
        tensor_of(second.context_logits), tensor_of(plain.context_logits)[-3:], atol=1e-5, rtol=1e-5
    )
