"""ModelDrafter: chooses how many guesses the workers' draft model makes in a step.

Every row gets the same number, because one pass of the draft model serves all rows. With r rows, where a_i is the share of right
guesses at row i (acceptance.py), the best number k maximises

    (r + sum over rows of (a_i + a_i^2 + ... + a_i^k) / MARGIN) / (seconds of a step of r rows with k passes)

Steps without guesses are measured first, and again every PERIOD steps. Where guesses do not pay, some steps try one guess
after a while. A try is expensive, because the draft model first computes the tokens that it has missed, so tries become rare.
"""

from __future__ import annotations

from collections.abc import Collection

from backend.api.config.schema import EngineConfig, SpeculationConfig
from backend.core.clock import Clock
from backend.core.sequence import Sequence
from backend.core.step import SequenceId
from backend.scheduler.drafting import Draft, Drafter, may_guess
from backend.scheduler.step_cost import ASSUMED, LATEST, LEARNING, MARGIN, MAX_DRAFTS, PERIOD, SHARE

_FIRST_WAIT, _LONGEST_WAIT = 4 * PERIOD, 128 * PERIOD  # steps without guesses from one series of tries to the next


class ModelDrafter(Drafter):
    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self._assumed = ASSUMED
        self._accepted: dict[SequenceId, Acceptance | None] = {}  # None: the sequence must not have guesses
        self._num_alike = 0  # latest steps that all had guesses, or none
        self._latest = 0  # guesses at each row of the latest step
        self._num_tries = 0  # that are left
        self._wait = _FIRST_WAIT

    def expects(self, rows: list[Sequence]) -> bool:
        known = [acceptance.share for seq in rows if (acceptance := self._acceptance(seq)) is not None]
        return self._count(known, len(rows), MAX_DRAFTS) > 0

    def guess(self, rows: list[Sequence], num_rows: int, room: int) -> dict[SequenceId, Draft]:
        rows = [seq for seq in rows if not seq.num_inflight_samples]
        known = {seq.seq_id: acceptance for seq in rows if (acceptance := self._acceptance(seq)) is not None}
        most = {seq.seq_id: self._most(seq) for seq in rows if seq.seq_id in known}
        count = self._count([known[seq_id].share for seq_id in most if most[seq_id] > 0], num_rows, room)
        return {
            seq_id: Draft([], num_guesses=min(count, limit)) for seq_id, limit in most.items() if min(count, limit) > 0
        }

    def note(self, num_rows: int, drafts: Collection[Draft], seconds: float) -> None:
        if any(draft.is_given for draft in drafts):
            return
        count = max((draft.num_guesses for draft in drafts), default=0)
        self.cost.note(num_rows, seconds, count)
        self._num_alike = self._num_alike + 1 if (count > 0) == (self._latest > 0) else 1
        self._latest = count
        if count and not self._num_tries:
            self._wait = _FIRST_WAIT
        self._num_tries = max(0, self._num_tries - 1)
        if not count and self._num_alike % self._wait == 0:
            self._num_tries, self._wait = LATEST // 2, min(2 * self._wait, _LONGEST_WAIT)
            self.cost.forget_passes()

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        self._accepted.pop(seq.seq_id, None)

    def _acceptance(self, seq: Sequence) -> Acceptance | None:
        """The acceptance of a sequence, up to date; None if it must not have guesses."""
        if seq.seq_id not in self._accepted:
            self._accepted[seq.seq_id] = Acceptance(seq, self._assumed) if may_guess(seq) else None
        known = self._accepted[seq.seq_id]
        if known is not None:
            num_right, num_wrong = known.see(seq)
            for _ in range(num_right):
                self._assumed += SHARE * (1 - self._assumed)
            if num_wrong:
                self._assumed -= SHARE * self._assumed
        return known

    def _count(self, shares: list[float], num_rows: int, room: int) -> int:
        """The number of guesses at each row that may have some. `shares`: the share of right guesses of each."""
        most = min(self._config.max_draft_tokens, room // len(shares)) if shares else 0
        is_plain = self._latest > 0 and self._num_alike % PERIOD == 0
        if not most or is_plain or not self.cost.is_known(num_rows):
            return 0
        if self._num_tries:
            return 1
        best, best_rate, gain, chances = 0, num_rows / self.cost.seconds(num_rows), 0.0, shares
        for count in range(1, most + 1):
            gain += sum(chances) / MARGIN
            rate = (num_rows + gain) / self.cost.seconds(num_rows, count)
            if rate > best_rate:
                best, best_rate = count, rate
            chances = [chance * share for chance, share in zip(chances, shares)]
        return best


def make_drafter(config: EngineConfig, takes_drafts: bool, clock: Clock) -> Drafter | None:
    """The drafter of the configured mode of speculation; None for workers that verify no drafts."""
    if not takes_drafts:
        return None
    if config.speculation.mode == "draft_model":
        return ModelDrafter(config.speculation)
    return Drafter(config.speculation, config.kv_cache.sharing, clock)


_FADING = SHARE * LEARNING  # weight of a token without guesses


class Acceptance:
    """How often a draft model's guesses at one sequence are right, learnt from the guesses that steps have verified.

    A guess counts only if all guesses before it in its step were right, because tokens behind a wrong one prove nothing. While a
    sequence gets no guesses, its share drifts back to what is assumed of any sequence, so that guesses which did not pay are
    tried again now and then.
    """

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
