"""Acceptance: how often a draft model's guesses at one sequence are right, learnt from the guesses that steps have verified.

A guess counts only if all guesses before it in its step were right, because tokens behind a wrong one prove nothing. While a
sequence gets no guesses, its share drifts back to what is assumed of any sequence, so that guesses which did not pay are tried
again now and then.
"""

from __future__ import annotations

from backend.core.sequence import Sequence
from backend.scheduler.step_cost import ASSUMED, LEARNING, SHARE

_FADING = SHARE * LEARNING  # weight of a token without guesses


class Acceptance:
    def __init__(self, seq: Sequence, assumed: float = ASSUMED) -> None:
        self.share = self._assumed = assumed  # share of right guesses
        self._seen = seq.num_tokens, seq.num_guessed_tokens, seq.num_right_guesses

    def see(self, seq: Sequence) -> tuple[int, int]:
        """Learn from the guesses verified since the last call.

        Returns the number of right ones, and 1 if a wrong one followed, else 0: guesses behind the first wrong one mean nothing.
        """
        if seq.num_tokens == self._seen[0]:
            return 0, 0
        now = seq.num_tokens, seq.num_guessed_tokens, seq.num_right_guesses
        num_tokens, num_guessed, num_right = (new - old for new, old in zip(now, self._seen))
        self._seen = now
        for _ in range(num_right):
            self.share += LEARNING * (1 - self.share)
        if num_guessed > num_right:
            self.share -= LEARNING * self.share
        if not num_guessed:
            self.share += (1 - (1 - _FADING) ** num_tokens) * (self._assumed - self.share)
        return num_right, int(num_guessed > num_right)
