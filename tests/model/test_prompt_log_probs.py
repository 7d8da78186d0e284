"""Log-probabilities of the prompt: those of a plain forward, all of them and each once, whatever became of the KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from backend.api import ErrorCode, OutputConfig, PromptLogProb, SamplingConfig, SessionConfig, TensorData
from backend.worker import extra_outputs
from tests.model.conftest import Oracle
from tests.model.gathering import Engine, engine_config
from tests.model.tiers import TORCH, TierCase

PROMPTS = [[(7 * i + 3 * n) % 120 for i in range(length)] for n, length in enumerate((5, 31, 64, 70))]
TOP = 3
ASKED = OutputConfig(prompt_log_probs=TOP)
NEW = 4
TOLERANCE = 1e-4  # float32, sums in another order


def check(told: list[PromptLogProb] | None, prompt: list[int], logits: Tensor, first: int = 0) -> None:
    """Each entry is that of log_softmax and topk over the logits [tokens, vocab] behind the token ahead of it."""
    assert told is not None and len(told) == len(prompt) - 1 - first
    log_probs = torch.log_softmax(logits, dim=-1)
    for place, entry in enumerate(told, start=first):
        row, token_id = log_probs[place], prompt[place + 1]
        assert entry.log_prob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        values, ids = torch.topk(row, TOP)
        assert [top.token_id for top in entry.top] == ids.tolist()
        assert [top.log_prob for top in entry.top] == pytest.approx(values.tolist(), abs=TOLERANCE)
        assert entry.rank == 1 + int((row > row[token_id]).sum())


@pytest.mark.feature("002-28", "003-08", "003-09")
def test_they_equal_log_softmax_and_topk_of_a_plain_forward(family: tuple[Path, Oracle], tier: TierCase) -> None:
    directory, oracle = family
    engine = Engine(engine_config(directory, tier))
    for prompt in PROMPTS:
        result = engine.answer(prompt, NEW, ASKED).result
        check(result.prompt_log_probs, prompt, oracle.logits(prompt))
        assert result.top_log_probs is None and result.context_logits is None


@pytest.mark.parametrize("evict", [False, True])
def test_batches_chunks_and_evictions_change_and_repeat_nothing(
    checkpoint: Callable[[str], Path], tier: TierCase, evict: bool
) -> None:
    alone = Engine(engine_config(checkpoint("qwen3"), tier))
    expected = [alone.answer(prompt, NEW, ASKED).result for prompt in PROMPTS]
    small = {"max_chunk_tokens": 11, "max_num_tokens": 24, "max_context_tokens": 24, "policy": "max_utilization"}
    crowd = Engine(engine_config(checkpoint("qwen3"), tier, scheduler=small))
    ids = [crowd.ask(prompt, NEW, ASKED, streaming=True) for prompt in PROMPTS]
    crowd.ask(PROMPTS[1], NEW, OutputConfig())  # finds KV of the others, and asks for nothing
    crowd.run(evict)
    for request_id, mine in zip(ids, expected, strict=True):
        parts = [response.result for response in crowd.responses[request_id]]
        assert [part.prompt_log_probs is not None for part in parts] == [True] + [False] * (NEW - 1)
        for ours, theirs in zip(parts[0].prompt_log_probs, mine.prompt_log_probs, strict=True):
            assert ours.log_prob == pytest.approx(theirs.log_prob, abs=1e-5)
            assert [top.token_id for top in ours.top] == [top.token_id for top in theirs.top]
    if evict:  # without, the last request still finds eight tokens evicted
        assert crowd.core.counters.recomputed_tokens_total > 16


def test_a_prompt_whose_kv_is_cached_is_computed_again_and_serves_others_afterwards(
    checkpoint: Callable[[str], Path], tier: TierCase
) -> None:
    """The prompt has 70 tokens, of which whole blocks are found: 68 of blocks of 4, 64 of blocks of 32."""
    engine = Engine(engine_config(checkpoint("llama2"), tier))
    first, second = (engine.answer(PROMPTS[3], 2, ASKED).result for _ in range(2))
    counters = engine.core.counters
    assert (counters.cached_tokens_total, counters.context_tokens_total) == (0, 2 * 70)
    assert second.prompt_log_probs == first.prompt_log_probs and len(second.prompt_log_probs) == 69
    plain = engine.answer(PROMPTS[3], 2, OutputConfig()).result
    assert counters.cached_tokens_total == 69 // tier.block * tier.block
    assert plain.output_token_ids == first.output_token_ids


def test_a_session_tells_those_of_its_turns_prompt_and_keeps_its_kv(
    checkpoint: Callable[[str], Path], tier: TierCase
) -> None:
    """The turn's first token has no entry, as that of any prompt: the row ahead of it belongs to the turn before."""
    engine = Engine(engine_config(checkpoint("llama2"), tier))
    first = engine.answer(PROMPTS[1], 3, session=SessionConfig(1, start=True)).result
    turn = [4, 5, 6]
    result = engine.answer(turn, 2, ASKED, session=SessionConfig(1)).result
    history = first.output_token_ids[0]
    plain = Engine(engine_config(checkpoint("llama2"), tier))
    whole = plain.answer([*history, *turn], 0, ASKED).result.prompt_log_probs
    assert [entry.rank for entry in result.prompt_log_probs] == [entry.rank for entry in whole[-2:]]
    assert engine.core.counters.context_tokens_total == len(PROMPTS[1]) + 1 + len(turn)


def test_of_several_sequences_the_first_tells_them(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), tier))
    config = SamplingConfig(num_return_sequences=3, temperature=1.0, seed=5)
    request_id = engine.ask(PROMPTS[1], NEW, ASKED, sampling_config=config)
    engine.run()
    told = {answer.result.sequence_index: answer.result.prompt_log_probs for answer in engine.responses[request_id]}
    assert set(told) == {0, 1, 2} and told[1] is None and told[2] is None
    assert len(told[0]) == len(PROMPTS[1]) - 1


@pytest.mark.parametrize("max_rows", [1, 8])
def test_a_long_prompt_runs_in_passes_of_few_rows_with_the_same_outcome(
    checkpoint: Callable[[str], Path], tier: TierCase, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """Logits [rows, vocab] have no more rows than MAX_ROWS, and one for each of the two rows of a step."""
    both = OutputConfig(prompt_log_probs=TOP, return_context_logits=True)
    alone = Engine(engine_config(checkpoint("llama2"), tier))
    expected = [alone.answer(prompt, NEW, both).result for prompt in PROMPTS[:2]]
    monkeypatch.setattr(extra_outputs, "MAX_ROWS", max_rows)
    engine = Engine(engine_config(checkpoint("llama2"), tier, reuse=False))
    with monkeypatch.context() as patched:
        tier_of_engine = engine.workers.runner.tier
        spy = Mock(side_effect=tier_of_engine.run)
        patched.setattr(tier_of_engine, "run", spy)
        ids = [engine.ask(prompt, NEW, both) for prompt in PROMPTS[:2]]
        engine.run()
    assert max(sum(call.args[2]) for call in spy.call_args_list) == max(max_rows, 2)
    for request_id, mine in zip(ids, expected, strict=True):
        got = engine.responses[request_id][-1].result
        assert got.output_token_ids == mine.output_token_ids
        assert [entry.rank for entry in got.prompt_log_probs] == [entry.rank for entry in mine.prompt_log_probs]
        assert got.context_logits.shape == mine.context_logits.shape


def test_zero_alternatives_no_output_and_a_prompt_of_one_token(
    checkpoint: Callable[[str], Path], tier: TierCase
) -> None:
    engine = Engine(engine_config(checkpoint("llama2"), tier))
    told = engine.answer(PROMPTS[0], 0, OutputConfig(prompt_log_probs=0)).result.prompt_log_probs
    assert [entry.top for entry in told] == [[]] * 4 and all(entry.log_prob < 0 for entry in told)
    assert engine.answer([3], 2, ASKED).result.prompt_log_probs is None


def test_what_cannot_be_had_is_refused_with_the_limit(checkpoint: Callable[[str], Path]) -> None:
    """70 tokens with 3 alternatives: 70 rows of 5 + 4 * 3 numbers of 4 bytes are 4760 bytes."""
    engine = Engine(
        engine_config(checkpoint("llama2"), TORCH, limits={"max_top_log_probs": 3, "max_tensor_bytes": 4759})
    )
    answers = {
        "prompt_log_probs is 4, allowed is 0 to 3 (limits.max_top_log_probs)": engine.answer(
            [1, 2], 1, OutputConfig(prompt_log_probs=4)
        ),
        "take up to 4760 bytes of one response (70 prompt tokens, 1 output tokens)": engine.answer(
            PROMPTS[3], 1, ASKED
        ),
        "of a prompt with prompt_embeddings": engine.answer(
            [1, engine.core.model.vocab_size],
            1,
            ASKED,
            prompt_embeddings=TensorData(
                "float32", (1, width := engine.core.model.prompt_embedding_width), bytes(4 * width)
            ),
        ),
    }
    for text, answer in answers.items():
        assert text in answer.error_msg
    assert list(answers.values())[2].error_code is ErrorCode.UNSUPPORTED
