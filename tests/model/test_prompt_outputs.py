"""Hidden states and chosen logits of a prompt: those of a plain forward, and the same bits whatever ran beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from backend.api import OutputConfig, SamplingConfig
from tests.model.conftest import Oracle
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.tiers import NATIVE, TORCH, TierCase

PROMPTS = [[(7 * i + 3 * n) % 120 for i in range(length)] for n, length in enumerate((1, 5, 31, 64, 70))]
LAST = OutputConfig(prompt_hidden_states="last", prompt_logits_of=(9, 3, 9))
ALL = OutputConfig(prompt_hidden_states="all")
Checkpoint = Callable[[str], Path]


@torch.inference_mode()
def hidden_states(oracle: Oracle, tokens: list[int]) -> torch.Tensor:
    return oracle.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_they_equal_a_plain_forward(family: tuple[Path, Oracle], tier: TierCase, max_tokens: int) -> None:
    directory, oracle = family
    engine = Engine(engine_config(directory, tier))
    for prompt in PROMPTS:
        result = engine.answer(prompt, max_tokens, LAST).result
        hidden, logits = hidden_states(oracle, prompt)[-1:], oracle.logits(prompt)[-1:, [9, 3, 9]]
        torch.testing.assert_close(tensor_of(result.prompt_hidden_states), hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(tensor_of(result.prompt_logits), logits, atol=1e-4, rtol=1e-4)
        assert len(result.output_token_ids[0]) == len(prompt) + max_tokens
        rows = tensor_of(engine.answer(prompt, max_tokens, ALL).result.prompt_hidden_states)
        torch.testing.assert_close(rows, hidden_states(oracle, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("evict", [False, True])
def test_batches_chunks_evictions_and_found_kv_change_no_bit(
    checkpoint: Checkpoint, native_kernels: None, evict: bool
) -> None:
    alone = Engine(engine_config(checkpoint("qwen3"), NATIVE))
    expected = {n: [alone.answer(prompt, 0, one).result for one in (LAST, ALL)] for n, prompt in enumerate(PROMPTS)}
    assert alone.core.counters.cached_tokens_total == 0, "a request for all rows reuses no KV"
    small = {"max_chunk_tokens": 11, "max_num_tokens": 24, "max_context_tokens": 24, "policy": "max_utilization"}
    crowd = Engine(engine_config(checkpoint("qwen3"), NATIVE, scheduler=small))
    ids = {(n, k): crowd.ask(PROMPTS[n], 0, one) for n in expected for k, one in enumerate((LAST, ALL))}
    crowd.ask(PROMPTS[2], 4, OutputConfig())
    crowd.run(evict)
    again = {key: crowd.ask(PROMPTS[key[0]], 0, (LAST, ALL)[key[1]]) for key in ids}
    crowd.run()
    for (n, k), first in ids.items():
        for request_id in (first, again[n, k]):
            result = crowd.responses[request_id][-1].result
            assert result.prompt_hidden_states == expected[n][k].prompt_hidden_states
            assert result.prompt_logits == expected[n][k].prompt_logits
    assert evict is (crowd.core.counters.recomputed_tokens_total > 16)


def test_a_found_prompt_runs_its_last_token_only(checkpoint: Checkpoint) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), TORCH))
    first, second = (engine.answer(PROMPTS[3], 0, LAST).result for _ in range(2))
    assert engine.core.counters.cached_tokens_total > 32
    torch.testing.assert_close(
        tensor_of(second.prompt_hidden_states), tensor_of(first.prompt_hidden_states), atol=1e-5, rtol=1e-5
    )


def test_of_several_sequences_the_first_returns_them(checkpoint: Checkpoint) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), TORCH))
    config = SamplingConfig(num_return_sequences=2, temperature=1.0)
    request_id = engine.ask(PROMPTS[1], 2, LAST, sampling_config=config)
    engine.run()
    results = [response.result for response in engine.responses[request_id]]
    assert {(one.sequence_index, one.prompt_logits is not None) for one in results} == {(0, True), (1, False)}


@pytest.mark.parametrize(
    ("output", "fields", "sentence"),
    [
        (
            OutputConfig(prompt_logits_of=(5, 1 << 20)),
            {},
            "prompt_logits_of has token 1048576, which is outside the vocabulary; allowed is 0 to 130",
        ),
        (
            OutputConfig(prompt_logits_of=tuple(range(100)) * 3),
            {},
            "prompt_logits_of has 300 tokens, the limit is 256; leave some out",
        ),
        (
            LAST,
            {"sampling_config": SamplingConfig(beam_width=2)},
            "prompt_hidden_states cannot be had with beams in this version; leave it out, or set beam_width to 1",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(
    checkpoint: Checkpoint, output: OutputConfig, fields: dict[str, SamplingConfig], sentence: str
) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), TORCH, scheduler={"max_beam_width": 2}))
    (error,) = engine.responses[engine.ask([1, 2], 1, output, **fields)]
    assert error.error_msg == sentence


def test_all_rows_of_a_long_prompt_are_refused_where_they_take_too_much_memory(checkpoint: Checkpoint) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), TORCH, limits={"max_tensor_bytes": 2000}))
    assert engine.answer(PROMPTS[4], 0, LAST).result.prompt_hidden_states is not None
    (error,) = engine.responses[engine.ask(PROMPTS[4], 0, ALL)]
    assert "limits.max_tensor_bytes" in error.error_msg
