"""Log-probabilities of a real model equal log_softmax and topk of transformers' logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compat.llm import LLM, SamplingParams

PROMPT = [5, 90, 17, 200]
TOLERANCE = 1e-4  # float32, sums in another order


@pytest.mark.feature("002-28")
@torch.inference_mode()
def test_they_are_those_of_the_models_own_distribution(llm: LLM, model_dir: Path) -> None:
    asked = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3, temperature=5.0, seed=4)
    output = llm.generate(PROMPT, asked).outputs[0]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    logits = model(torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    log_probs = torch.log_softmax(logits, -1)
    outside = 0
    for token_id, told, row in zip(output.token_ids, output.logprobs, log_probs):
        values, ids = torch.topk(row, 3)
        ranked = sorted((entry.rank, i, entry.logprob) for i, entry in told.items() if entry.rank is not None)
        assert [i for _, i, _ in ranked] == ids.tolist() and [rank for rank, _, _ in ranked] == [1, 2, 3]
        assert [value for _, _, value in ranked] == pytest.approx(values.tolist(), abs=TOLERANCE)
        assert told[token_id].logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        outside += told[token_id].rank is None
    assert outside > 0, "at this temperature some tokens are not among the three"
    total = sum(told[token_id].logprob for token_id, told in zip(output.token_ids, output.logprobs))
    assert output.cumulative_logprob == pytest.approx(total, abs=TOLERANCE)


@pytest.mark.feature("002-28", "003-09")
@torch.inference_mode()
@pytest.mark.parametrize("streaming", [False, True])
def test_those_of_the_prompt_are_of_the_token_that_follows_each(llm: LLM, model_dir: Path, streaming: bool) -> None:
    """Row p of the logits is of the token behind prompt token p; behind the last one comes the first output token.

    Each dictionary has the 3 most likely tokens and the one that follows, so 3 entries or 4.
    """
    asked = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=3, logprobs=1, temperature=5.0, seed=4)
    result = llm.generate_async(PROMPT, asked, streaming=streaming)
    told_at_first = len(next(result).outputs[0].prompt_logprobs) if streaming else len(PROMPT)
    output = result.result().outputs[0]
    assert told_at_first == len(output.prompt_logprobs) == len(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], -1)
    for row, following, told in zip(rows, [*PROMPT[1:], output.token_ids[0]], output.prompt_logprobs):
        values, ids = torch.topk(row, 3)
        assert [told[i].rank for i in ids.tolist()] == [1, 2, 3]
        assert [told[i].logprob for i in ids.tolist()] == pytest.approx(values.tolist(), abs=TOLERANCE)
        assert told[following].logprob == pytest.approx(row[following].item(), abs=TOLERANCE)
        assert set(told) == {*ids.tolist(), following}
    ranks = [told[i].rank for i, told in zip(PROMPT[1:], output.prompt_logprobs)]
    assert ranks == [1 + int((row > row[i]).sum()) for row, i in zip(rows, PROMPT[1:])]
    assert all(len(told) <= 2 for told in output.logprobs), "one alternative of an output token was asked for"


def test_all_sequences_have_those_of_the_prompt_and_more_than_the_limit_are_refused(llm: LLM) -> None:
    several = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0, n=3, temperature=5.0, seed=1)
    outputs = llm.generate(PROMPT, several).outputs
    inside = [output.prompt_logprobs[:-1] for output in outputs]
    assert inside[0] == inside[1] == inside[2] and [set(told) for told in inside[0]] == [{i} for i in PROMPT[1:]]
    assert [set(output.prompt_logprobs[-1]) for output in outputs] == [{output.token_ids[0]} for output in outputs]
    assert all(output.logprobs == [] for output in outputs)
    with pytest.raises(ValueError, match=r"prompt_logprobs is 21, the limit is 20 \(limits.max_top_log_probs\)"):
        llm.generate(PROMPT, SamplingParams(prompt_logprobs=21))
