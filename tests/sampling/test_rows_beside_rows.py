"""Rules of rows that are chosen at once, in slots that are not their numbers: each reads its own tokens and its own lists."""

from __future__ import annotations

import numpy as np
import torch
from transformers.generation import logits_process as hf

from backend.api.sampling import SamplingConfig
from backend.worker.extra_outputs import packed_rows
from tests.sampling.conftest import Run
from tests.sampling.reference import Case

VOCAB = 6
END = 99  # an end id that HF's processor asks for, beyond the vocabulary


def preferring(token: int) -> np.ndarray:
    logits = np.arange(VOCAB, dtype=np.float32)
    logits[token] = 9.0
    return logits


def test_bad_words_of_several_lengths_are_masked_by_the_row_s_own_tokens(run: Run) -> None:
    """Every token is preferred once behind each prompt, so that one masked too many or too few is seen."""
    words = [[4], [1, 2], [3, 1, 5], [0, 0]]
    prompts = [[3, 1], [2, 1], [5, 3, 1], [0], [0, 3, 1, 0], [1]]
    cases = [
        Case(tokens, 1, preferring(token), SamplingConfig(), bad_words=words)
        for tokens in prompts
        for token in range(VOCAB)
    ]
    processor = hf.NoBadWordsLogitsProcessor(words, eos_token_id=END)
    expected = [
        int(processor(torch.tensor([case.tokens]), torch.from_numpy(case.logits.copy())[None]).argmax())
        for case in cases
    ]
    got = run(cases, slots=list(reversed(range(len(cases)))))
    assert [token.token_id for token in got] == expected
    assert len(set(expected)) > 3


def test_no_more_alternatives_are_told_than_there_are_tokens(run: Run) -> None:
    (token,) = run([Case([0], 1, preferring(2), SamplingConfig())], return_log_probs=True, top_log_probs=VOCAB + 4)
    assert [token_id for token_id, _ in token.top_log_probs] == [2, 5, 4, 3, 1, 0]
    assert token.top_log_probs[0][1] == token.log_prob


def test_tokens_that_are_equally_likely_share_the_best_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    for following, ranks in (([4, 3], [1, 1]), ([0, 0], [4, 1]), ([3, 4], [5, 1])):
        assert packed_rows(logits, torch.tensor(following), 0)[:, 0].tolist() == ranks
