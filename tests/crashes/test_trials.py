"""Trials: a request that may have ended engines runs alone for a while, and the others go on behind it."""

from __future__ import annotations

import pytest

from backend.api import SamplingConfig
from backend.core.messages import CLIENT_SHIFT, Cancel, Delivered, Resume
from tests.crashes.lives import Lives
from tests.crashes.test_rules import make, stream
from tests.fakes.hash_worker import oracle


@pytest.mark.parametrize("num_had", [0, 3, 8])
def test_on_trial_a_request_runs_alone_and_the_others_go_on_behind_it(num_had: int) -> None:
    """What its client has had of it before does not count."""
    lives = Lives(make)
    had = oracle([7, 7], num_had, 1000)
    others = [lives.ask(stream([i, 2], 40)) for i in range(1, 4)]
    lives.run(lambda: all(each.responses for each in others))
    suspect = lives.ask(stream([7, 7], 40), Resume([Delivered(had)] if had else [], trial_tokens=5))
    waiting = lives.ask(stream([8, 8], 40), Resume(trial_tokens=5))
    counts = [len(each.responses) for each in others]
    lives.run(lambda: len(suspect.responses) >= 5)
    assert [len(each.responses) for each in others] == counts and not waiting.responses
    lives.run(lambda: len(waiting.responses) >= 5)
    assert [len(each.responses) for each in others] == counts and len(suspect.responses) == 5
    lives.run(lambda: all(each.has_ended for each in [*others, suspect, waiting]))
    for prompt, client in zip(([1, 2], [2, 2], [3, 2], [7, 7], [8, 8]), [*others, suspect, waiting], strict=True):
        tokens = [token for each in client.responses for token in each.result.output_token_ids[0]]
        assert tokens == oracle(prompt, 40, 1000)[num_had if client is suspect else 0 :]
    assert lives.loop.trials.request_id is None
    lives.core.check_integrity()


def test_a_suspect_that_is_cancelled_leaves_the_engine_to_the_others() -> None:
    lives = Lives(make)
    other = lives.ask(stream([1, 2], 30))
    suspects = [lives.ask(stream([i, 7], 40), Resume(trial_tokens=0)) for i in (3, 4)]
    lives.run(lambda: len(suspects[0].responses) >= 3)
    for number in (3, 2):
        lives.tell(Cancel(lives.index << CLIENT_SHIFT | number))
    lives.run(lambda: all(each.has_ended for each in (other, *suspects)))
    assert lives.core.scheduler.only is None


def test_a_trial_of_several_sequences_ends_when_each_has_its_new_tokens() -> None:
    """They have had unequal numbers of tokens before, and one of them begins anew."""
    lives = Lives(make)
    other = lives.ask(stream([1, 2], 60))
    lives.run(lambda: bool(other.responses))
    num_before = len(other.responses)
    sampled = SamplingConfig(num_return_sequences=3, temperature=1.0, seed=4)
    undisturbed = Lives(make)
    whole = undisturbed.ask(stream([7, 7], 20, sampling_config=sampled))
    undisturbed.run(lambda: whole.has_ended)
    right: list[list[int]] = [[], [], []]
    for each in whole.responses:
        right[each.result.sequence_index] += each.result.output_token_ids[0]
    had = [right[0][:9], right[1][:2], []]
    resume = Resume([Delivered(tokens) for tokens in had], trial_tokens=4)
    suspect = lives.ask(stream([7, 7], 20, sampling_config=sampled), resume)
    lives.run(lambda: len(other.responses) > num_before)
    new: list[list[int]] = [[], [], []]
    for each in suspect.responses:
        new[each.result.sequence_index] += each.result.output_token_ids[0]
    counts = [len(tokens) for tokens in new]
    assert min(counts) == 4 + 1 and max(counts) <= 4 + 2, counts  # all run in the step that follows the trial
    lives.run(lambda: suspect.has_ended and other.has_ended)
    got = [list(tokens) for tokens in had]
    for each in suspect.responses:
        got[each.result.sequence_index] += each.result.output_token_ids[0]
    assert got == right
