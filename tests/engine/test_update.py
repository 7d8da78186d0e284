"""What a sampled token does to its sequence."""

from __future__ import annotations

import pytest

from backend.api import OutputConfig, Request
from backend.core.sequence import Sequence
from backend.core.step import SampledToken
from backend.engine.update import append_token


def make_sequence(**output: object) -> Sequence:
    return Sequence(1, 10, Request([1, 2], 5, output_config=OutputConfig(**output)), 1, 0)


@pytest.mark.feature("003-03")
def test_appending_a_token_sums_its_log_prob() -> None:
    seq = make_sequence(return_log_probs=True)
    for n, log_prob in enumerate((-0.5, -1.25, -2.0)):
        append_token(seq, SampledToken(0, 7 + n, log_prob), now_ns=100 + n)
    assert (seq.token_ids, seq.num_prompt_tokens, seq.num_output_tokens) == ([1, 2, 7, 8, 9], 2, 3)
    assert (seq.log_probs, seq.cum_log_prob) == ([-0.5, -1.25, -2.0], -3.75)
    assert (seq.first_token_ns, seq.last_token_ns) == (100, 102)


def test_the_most_likely_tokens_can_be_asked_for_without_the_log_prob_of_the_chosen_one() -> None:
    seq = make_sequence(top_log_probs=2)
    append_token(seq, SampledToken(0, 7, None, [(7, -0.5), (3, -1.0)]), now_ns=1)
    assert seq.top_log_probs == [[(7, -0.5), (3, -1.0)]] and seq.log_probs == [] and seq.cum_log_prob == 0.0
