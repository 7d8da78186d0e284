"""Log-probabilities of a real model equal log_softmax and topk of transformers' logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from backend.llm import LLM, SamplingParams

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
