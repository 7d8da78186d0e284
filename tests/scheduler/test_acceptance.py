"""Acceptance: the share of a draft model's guesses that are right. Expectations are worked out by hand."""

from __future__ import annotations

import pytest

from backend.scheduler.model_drafting import Acceptance


class Told:
    """Of a sequence, what Acceptance looks at."""

    def __init__(self) -> None:
        self.num_tokens, self.num_guessed_tokens, self.num_right_guesses = 10, 0, 0

    def step(self, num_guessed: int, num_right: int) -> Told:
        self.num_tokens += num_right + 1
        self.num_guessed_tokens += num_guessed
        self.num_right_guesses += num_right
        return self


def test_acceptance_is_the_share_of_guesses_that_count() -> None:
    """Of four guesses two are right, one is wrong, one counts for nothing: two of three. Each counts a tenth when it comes, so
    in the long run it goes round between steps: behind the wrong one x, behind two right ones 1 - 0.81 (1 - x), and x is 0.9
    of that: x = 0.171 / 0.271.
    """
    seq = Told()
    acceptance = Acceptance(seq)
    for _ in range(100):
        acceptance.see(seq.step(4, 2))
        before = acceptance.share
        acceptance.see(seq)  # asking again changes nothing
        assert acceptance.share == before
    assert before == pytest.approx(0.171 / 0.271, rel=1e-6)


def test_what_is_known_of_guesses_fades_while_there_are_none() -> None:
    """Always wrong: 0.7 * 0.9^50. Then 100 tokens without guesses go the share 1 - 0.995^100 of the way back to 0.7."""
    seq = Told()
    acceptance = Acceptance(seq)
    for _ in range(50):
        acceptance.see(seq.step(3, 0))
    bad = 0.7 * 0.9**50
    assert acceptance.share == pytest.approx(bad)
    for _ in range(100):
        acceptance.see(seq.step(0, 0))
    assert acceptance.share == pytest.approx(0.7 - (0.7 - bad) * 0.995**100)


def test_what_was_seen_of_former_requests_is_not_of_this_one() -> None:
    """A session's turn before has had 50 guesses, all wrong. Of this one 3 are right: 1 - 0.3 * 0.9^3. None of them is wrong."""
    seq = Told().step(50, 0)
    acceptance = Acceptance(seq)
    assert acceptance.share == 0.7
    acceptance.see(seq.step(3, 3))
    assert acceptance.share == pytest.approx(1 - 0.3 * 0.9**3)


def test_tokens_without_guesses_fade_alike_however_often_it_looks() -> None:
    """One step of three wrong guesses, then ten tokens without any, in one look and in ten."""
    seqs = Told(), Told()
    once, often = map(Acceptance, seqs)
    for seq, acceptance in zip(seqs, (once, often)):
        acceptance.see(seq.step(3, 0))
    seqs[0].num_tokens += 10
    once.see(seqs[0])
    for _ in range(10):
        often.see(seqs[1].step(0, 0))
    assert once.share == pytest.approx(often.share) == pytest.approx(0.7 - 0.07 * 0.995**10)
