"""Which requests may have drafts, and how many guesses lookahead decoding tries."""

from __future__ import annotations

import pytest

from backend.api import AdditionalOutput, InvalidRequest, OutputConfig, Request, SamplingConfig, TensorData, Unsupported
from backend.api.draft_limits import check_drafts, drafts_of_lookahead, what_forbids_drafts

ONE_BY_ONE = {
    "beam_width": dict(sampling_config=SamplingConfig(beam_width=2)),
    "logits_post_processor": dict(logits_post_processor="mine"),
    "top_p_decay": dict(sampling_config=SamplingConfig(top_p=0.9, top_p_decay=0.5)),
    "return_generation_logits": dict(output_config=OutputConfig(return_generation_logits=True)),
    "additional_outputs": dict(output_config=OutputConfig(additional_outputs=(AdditionalOutput("x"),))),
    "prompt_embeddings": dict(prompt_embeddings=TensorData("float32", (1, 1), bytes(4))),
}


def check(takes_drafts: bool = True, guesses: bool = True, max_seq_len: int = 8, **fields: object) -> None:
    check_drafts(Request([1, 2], 4, **fields), takes_drafts, max_seq_len, guesses)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_needs_its_tokens_one_by_one_forbids_drafts(name: str) -> None:
    """Without drafts of its own the request is fine: the engine guesses nothing for it."""
    assert what_forbids_drafts(Request([1], 4, **ONE_BY_ONE[name])) == name
    check(**ONE_BY_ONE[name])
    with pytest.raises(InvalidRequest, match=f"^draft_tokens are given with {name}, "):
        check(draft_tokens=[3], **ONE_BY_ONE[name])


def test_context_logits_forbid_drafts_as_those_of_the_generation_do() -> None:
    request = Request([1], 4, output_config=OutputConfig(return_context_logits=True))
    assert what_forbids_drafts(request) == "return_generation_logits"


def test_a_plain_request_may_have_as_many_drafts_as_a_sequence_has_tokens() -> None:
    """Sampling, penalties, stop words and log-probabilities of its own take nothing away."""
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, repetition_penalty=1.2)
    fields = dict(sampling_config=sampling, output_config=OutputConfig(return_log_probs=True), stop_words=[[3]])
    check(draft_tokens=[3] * 8, **fields)
    with pytest.raises(InvalidRequest, match="draft_tokens has 9 tokens, the limit is 8; shorten it"):
        check(draft_tokens=[3] * 9, **fields)
    with pytest.raises(Unsupported, match="draft_tokens are given, which these kernels cannot verify; leave them out"):
        check(takes_drafts=False, draft_tokens=[3])
    check(takes_drafts=False)
    check(guesses=False, draft_tokens=[3])


def test_a_bound_of_guesses_needs_guesses() -> None:
    for most in (0, 1):
        check(max_draft_tokens=most)
        with pytest.raises(Unsupported, match=f"max_draft_tokens is {most} .* start it with speculation.mode=lookup"):
            check(guesses=False, max_draft_tokens=most)
    with pytest.raises(InvalidRequest, match="max_draft_tokens is -1, the least is 0; raise it"):
        check(max_draft_tokens=-1)


@pytest.mark.parametrize(("sizes", "expected"), [((1, 1, 0), 0), ((7, 2, 0), 1), ((1, 5, 3), 4)])
def test_of_an_n_gram_all_tokens_but_the_first_are_guessed(sizes: tuple[int, int, int], expected: int) -> None:
    assert drafts_of_lookahead(*sizes) == expected


@pytest.mark.parametrize("sizes", [(0, 5, 3), (7, 0, 3), (7, 5, -1)])
def test_impossible_sizes_are_refused_with_the_least(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(
        InvalidRequest, match="window size {}, n-gram size {} and .* size {}; the least are".format(*sizes)
    ):
        drafts_of_lookahead(*sizes)
