"""Drafter: which rows of a step get drafts, and how many.

Drafts are guesses at the next tokens of a row, which the step verifies (core/step.py). They come from:

    the request          `draft_tokens`, while the output equals them. All of them are tried
    lookup.py            the sequence's own tokens and outputs of its namespace, if `speculation.mode` is lookup
    the workers          their draft model, if the mode is draft_model: see model_drafting.py

The number of drafts maximises tokens per second, by the measured cost of steps (step_cost.py). With r rows, and e the sum over
drafts of the probability that a draft and all before it are right, that rate is

    (r + e / MARGIN) / (seconds of a step with these drafts)

and a step gets drafts only if it is CLEARLY faster with them. A step of one row, whose time goes to reading the weights, takes
drafts that are rarely right; a step of many rows, whose time goes to computing, only drafts that are nearly always right.

Guessing takes time on the host. Where it costs more than it wins, by the same estimate, it rests for some steps.

The knowledge about a sequence follows from its tokens alone, so asking twice, or dropping a plan, changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from backend.api.config.schema import Sharing, SpeculationConfig
from backend.api.draft_limits import what_forbids_drafts
from backend.core.clock import Clock, SystemClock
from backend.core.sequence import Sequence
from backend.core.step import SequenceId
from backend.scheduler.lookup import Lookup, OtherOutputs
from backend.scheduler.step_cost import MARGIN, MAX_DRAFTS, RESTS, SHARE, StepCost

CLEARLY = 1 + SHARE  # tokens that a step with drafts must bring where a plain one brings one


class Draft(NamedTuple):
    """Guesses at the next tokens of a sequence: their ids, or the number of guesses that a draft model is to make."""

    token_ids: list[int]
    is_given: bool = False  # by the request
    num_guesses: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_guesses


NO_DRAFT = Draft([])


class Drafter:
    def __init__(self, config: SpeculationConfig, sharing: Sharing = "namespace", clock: Clock | None = None) -> None:
        """`sharing`: who may guess from whose outputs, as with KV."""
        self._config = config
        self._clock = clock or SystemClock()
        self._won_s = 0.0  # by guessing lately, less the time it took
        self._speed = CLEARLY  # expected of the latest step with guesses; a plain step has 1
        self._num_resting = 0  # steps that are left of a rest
        self._sharing = sharing
        self._looks_up = config.mode == "lookup"
        self.others = OtherOutputs(config.max_shared_tokens) if self._looks_up and sharing != "none" else None
        self._known: dict[SequenceId, Lookup | None] = {}  # None: the sequence must not have drafts
        self.cost = StepCost()

    @property
    def guesses(self) -> bool:
        """True if drafts come from anywhere but the requests."""
        return self._config.mode != "none"

    def waits(self, rows: list[Sequence]) -> bool:
        """True if planning must wait for the tokens of `rows` that are in flight, because drafts are likely to pay.

        All rows wait, or none does: a step for some of them would take nearly as long as one for all.
        """
        return any(map(_follows_script, rows)) or self.expects(rows)

    def expects(self, rows: list[Sequence]) -> bool:
        """True if drafts that no request brings are likely to pay."""
        if not self._looks_up or self._num_resting or self.cost.is_trial(self._speed):
            return False
        if self._speed < CLEARLY and not self.cost.is_refreshed:
            return False
        return any(known.confidence(0) > 0.5 for known in map(self._known_of, rows) if known is not None)

    def propose(self, generation: list[Sequence], room: int) -> dict[SequenceId, Draft]:
        """Drafts for rows that generate, in all at most `room` tokens."""
        room, drafts, others = min(room, MAX_DRAFTS), dict[SequenceId, Draft](), list[Sequence]()
        for seq in generation:
            if not seq.request.draft_tokens or not _follows_script(seq):
                others.append(seq)
                continue
            most = 0 if seq.num_inflight_samples else min(room, _left(seq))
            if most > 0:
                drafts[seq.seq_id] = draft = Draft(_script(seq)[:most], is_given=True)
                room -= draft.num_tokens
        return drafts | self.guess(others, len(generation), room) if others else drafts

    def guess(self, rows: list[Sequence], num_rows: int, room: int) -> dict[SequenceId, Draft]:
        """Drafts that no request brings, for `rows` of the step's `num_rows`."""
        if not self._looks_up or self._num_resting or self.cost.is_trial(self._speed):
            self._num_resting = max(0, self._num_resting - 1)
            return {}
        landed = [seq for seq in rows if not seq.num_inflight_samples]
        if not landed:
            return {}
        began_ns, drafts = self._clock.monotonic_ns(), dict[SequenceId, Draft]()
        num_tokens, expected = num_rows, float(num_rows)
        least = self._least(num_tokens, expected)
        tells = least >= 1  # True if this step shows whether guesses pay: too few known guesses show nothing
        for seq in landed if least < 1 else ():
            most = min(room, self._most(seq))
            known = self._known_of(seq) if most > 0 else None
            if known is None or known.confidence(0) < least:
                continue
            tells |= known.confidence(0) > 0.5
            count, gain = self._worth(known, most, num_tokens, expected)
            if not count:
                continue
            drafts[seq.seq_id] = draft = Draft(known.propose(count))
            expected += gain
            room -= draft.num_tokens
            num_tokens += draft.num_tokens
            least = self._least(num_tokens, expected)
        plain_s = self.cost.seconds(num_rows)
        slow_s, fast_s = plain_s * expected / num_rows, self.cost.seconds(num_tokens)
        speed = slow_s / fast_s
        if tells:
            self._speed = speed
        if speed < CLEARLY:
            drafts, slow_s, fast_s = {}, 0.0, 0.0
        self._settle(slow_s - fast_s - (self._clock.monotonic_ns() - began_ns) / 1e9, plain_s)
        return drafts

    def note(self, num_rows: int, drafts: Collection[Draft], seconds: float) -> None:
        """A step that only generates was measured."""
        self.cost.note(num_rows + sum(draft.num_tokens for draft in drafts), seconds)

    def _most(self, seq: Sequence) -> int:
        """The most guesses that a row may have in a step."""
        asked = seq.request.max_draft_tokens
        most = self._config.max_draft_tokens if asked is None else min(asked, self._config.max_draft_tokens)
        return min(most, _left(seq))

    def _settle(self, won_s: float, plain_s: float) -> None:
        """Add what the drafts of one step have won, which takes `plain_s` without, to a sum in which older steps count less.

        Where the sum falls below -4 SHARE of a step, which is 1 % for each, guessing rests.
        """
        self._won_s = (1 - SHARE) * self._won_s + won_s
        if self._won_s < -4 * SHARE * plain_s:
            self._won_s, self._num_resting = 0.0, RESTS

    def _least(self, num_tokens: int, expected: float) -> float:
        """The probability of a row's first draft below which none of its drafts pay: further ones are no more probable."""
        return MARGIN * expected * self.cost.least_share(num_tokens, self._config.max_draft_tokens)

    def end(self, seq: Sequence) -> None:
        """Forget a sequence whose request or turn has ended, and remember its output for others."""
        known = self._known.pop(seq.seq_id, None)
        if known is not None and self.others is not None and self._shares(seq):
            self.others.add(seq.namespace, seq.token_ids[seq.num_prompt_tokens :])

    def _shares(self, seq: Sequence) -> bool:
        """Clients without a namespace must not learn from each other token by token."""
        return self._sharing == "all" or not seq.is_anonymous

    def _known_of(self, seq: Sequence) -> Lookup | None:
        """The lookup of a sequence, up to date; None if it must not have drafts."""
        if not self._looks_up:
            return None
        if seq.seq_id not in self._known:
            self._known[seq.seq_id] = self._nothing_known(seq) if may_guess(seq) else None
        known = self._known[seq.seq_id]
        if known is not None:
            known.see(seq.token_ids)
        return known

    def _nothing_known(self, seq: Sequence) -> Lookup:
        return Lookup(seq.namespace, self.others if self._shares(seq) else None)

    def _worth(self, known: Lookup, most: int, num_tokens: int, expected: float) -> tuple[int, float]:
        """The number of drafts of a row that pays most, and how many of them are expected to be right.

        num_tokens: tokens that the step runs so far; expected: tokens that they are expected to bring.
        """
        right, gain = known.confidence(0), 0.0
        best, best_gain, best_rate = 0, 0.0, 0.0
        for count in range(1, most + 1):
            if right < 1 / MAX_DRAFTS:
                break
            if count == 1:
                best_rate = expected / self.cost.seconds(num_tokens)
            gain += right / MARGIN
            rate = (expected + gain) / self.cost.seconds(num_tokens + count)
            if rate > best_rate:
                best, best_gain, best_rate = count, gain, rate
            right *= known.confidence(count)
        return best, best_gain


def may_guess(seq: Sequence) -> bool:
    return seq.request.speculation and not what_forbids_drafts(seq.request)


def _left(seq: Sequence) -> int:
    """The most drafts that a row can use: no draft follows the last token that it may have."""
    return seq.max_output_tokens - seq.num_output_tokens - 1


def _script(seq: Sequence) -> list[int]:
    """The rest of the request's own drafts."""
    return seq.request.draft_tokens[seq.num_output_tokens :]


def _follows_script(seq: Sequence) -> bool:
    """True if the whole output equals the request's drafts so far, and some of them are left."""
    script, num_output = seq.request.draft_tokens, seq.num_output_tokens
    return 0 < num_output < len(script) and seq.token_ids[seq.num_prompt_tokens :] == script[:num_output]
