"""Drafter: which rows of a step get drafts, and how many.

Drafts are guesses at the next tokens of a row, which the step verifies (core/step.py). Where they come from:

    the request          `draft_tokens`: for as long as the output is what they say. All of them are tried
    lookup.py            the sequence's own tokens and outputs of its namespace, if `speculation.mode` is lookup
    the workers          their draft model, if it is draft_model: here is only decided how many it makes (acceptance.py)

A row gets as many as bring the most tokens a second, by what steps have taken so far (step_cost.py). With r rows, and e tokens
expected of all drafts, the sum over drafts of the probability that each and all before it are right, that is the greatest

    (r + e / MARGIN) / (seconds of a step with these drafts)

A step of one row, whose time goes to reading the weights, takes drafts that are rarely right; one of many rows, whose time goes
to computing, only those that nearly always are.

Guessing takes time of its own, on the host. Where that is more than what it wins, by the same estimate, it rests for some steps.

What it knows of a sequence follows from its tokens alone, so asking twice, or dropping a plan, changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from backend.api.config import Sharing, SpeculationConfig
from backend.api.draft_limits import what_forbids_drafts
from backend.core.clock import Clock, SystemClock
from backend.core.sequence import Sequence
from backend.core.step import SequenceId
from backend.scheduler.acceptance import Acceptance
from backend.scheduler.lookup import Lookup, OtherOutputs
from backend.scheduler.step_cost import StepCost

MARGIN = 1.25  # a draft must be worth so much more than it costs
_LEAST = 0.01  # drafts with a smaller probability are not thought about
_RESTS = 100  # steps
_KEPT = 0.95  # share of what was won or lost so far that counts beside the newest step
_BEARABLE = 0.2  # of a step that may be lost in that sum, hence 1 % for each
MAX_DRAFTS = 256  # of one step: each may need a row of logits, as long as the vocabulary


class Draft(NamedTuple):
    """Guesses at the next tokens of a sequence: those that are known, or the number of those that a draft model is to make."""

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
        self._won_s = 0.0  # by guessing lately, less what it took
        self._num_resting = 0  # steps that are left of a rest
        self._sharing = sharing
        looks_up = config.mode == "lookup"
        self.others = OtherOutputs(config.max_shared_tokens) if looks_up and sharing != "none" else None
        self._known: dict[SequenceId, Lookup | Acceptance | None] = {}  # None: it must not have drafts
        self.cost = StepCost()

    @property
    def guesses(self) -> bool:
        """Whether drafts come from anywhere but the requests."""
        return self._config.mode != "none"

    def waits(self, seq: Sequence) -> bool:
        """Whether to plan no further for a sequence before its tokens in flight are known, because drafts are likely."""
        if _follows_script(seq):
            return True
        known = self._known_of(seq)
        return known is not None and known.confidence(0) > 0.5

    def propose(self, generation: list[Sequence], room: int) -> dict[SequenceId, Draft]:
        """Drafts for rows that generate, in all at most `room` tokens."""
        if not generation or not (self.guesses or any(seq.request.draft_tokens for seq in generation)):
            return {}
        began_ns, drafts = self._clock.monotonic_ns(), dict[SequenceId, Draft]()
        guesses = self.guesses and not self._num_resting and not self.cost.is_trial
        self._num_resting = max(0, self._num_resting - 1)
        room, num_tokens, expected = min(room, MAX_DRAFTS), len(generation), float(len(generation))
        least = self._least(num_tokens, expected) if guesses else 1.0
        for seq in generation:
            most = min(room, seq.max_output_tokens - seq.num_output_tokens - 1)
            if most <= 0 or seq.num_inflight_samples:
                continue
            if _follows_script(seq):
                draft = Draft(seq.request.draft_tokens[seq.num_output_tokens :][:most], is_given=True)
            elif least < 1:
                known = self._known_of(seq)
                if known is None or known.confidence(0) < least:
                    continue
                asked = seq.request.max_draft_tokens
                most = min(most, self._config.max_draft_tokens, most if asked is None else asked)
                count, gain = self._worth(known, most, num_tokens, expected)
                if not count:
                    continue
                draft = Draft(known.propose(count)) if isinstance(known, Lookup) else Draft([], num_guesses=count)
                expected += gain
            else:
                continue
            if draft.num_tokens:
                drafts[seq.seq_id] = draft
                room -= draft.num_tokens
                num_tokens += draft.num_tokens
                least = self._least(num_tokens, expected) if guesses else 1.0
        if guesses:
            num_guesses = sum(draft.num_tokens for draft in drafts.values() if not draft.is_given)
            plain_s, guessed_s = (self.cost.seconds(len(generation) + more) for more in (0, num_guesses))
            won_s = plain_s * expected / len(generation) - guessed_s
            self._settle(won_s - (self._clock.monotonic_ns() - began_ns) / 1e9, plain_s)
        return drafts

    def _settle(self, won_s: float, plain_s: float) -> None:
        """Take note of what guesses at one step have won, which would take `plain_s` without, and rest if it is too little."""
        self._won_s = _KEPT * self._won_s + won_s
        if self._won_s < -_BEARABLE * plain_s:
            self._won_s, self._num_resting = 0.0, _RESTS

    def _least(self, num_tokens: int, expected: float) -> float:
        """The probability of a row's first draft below which no number of them pays, for further ones are no more probable."""
        return MARGIN * expected * self.cost.least_share(num_tokens, self._config.max_draft_tokens)

    def end(self, seq: Sequence) -> None:
        """A request, or a session's turn, is over."""
        known = self._known.pop(seq.seq_id, None)
        if known is not None and self.others is not None and self._shares(seq):
            self.others.add(seq.namespace, seq.token_ids[seq.num_prompt_tokens :])

    def _shares(self, seq: Sequence) -> bool:
        """Clients without a namespace must not learn from each other token by token."""
        return self._sharing == "all" or not seq.is_anonymous

    def _known_of(self, seq: Sequence) -> Lookup | Acceptance | None:
        """What is known of a sequence; None if it must not have drafts."""
        if not self.guesses:
            return None
        if seq.seq_id not in self._known:
            may_guess = seq.request.speculation and not what_forbids_drafts(seq.request)
            self._known[seq.seq_id] = self._nothing_known(seq) if may_guess else None
        known = self._known[seq.seq_id]
        if isinstance(known, Lookup):
            known.see(seq.token_ids)
        elif known is not None:
            known.see(seq)
        return known

    def _nothing_known(self, seq: Sequence) -> Lookup | Acceptance:
        if self._config.mode == "draft_model":
            return Acceptance(seq)
        return Lookup(seq.namespace, self.others if self._shares(seq) else None)

    def _worth(self, known: Lookup | Acceptance, most: int, num_tokens: int, expected: float) -> tuple[int, float]:
        """How many drafts of a row pay, and how many of them are expected to be right.

        num_tokens, expected: of the step so far, what runs and what comes of it.
        """
        right, gain = known.confidence(0), 0.0
        best, best_gain, best_rate = 0, 0.0, 0.0
        for count in range(1, most + 1):
            if right < _LEAST:
                break
            if count == 1:
                best_rate = expected / self.cost.seconds(num_tokens)
            gain += right / MARGIN
            rate = (expected + gain) / self.cost.seconds(num_tokens + count)
            if rate > best_rate:
                best, best_gain, best_rate = count, gain, rate
            right *= known.confidence(count)
        return best, best_gain


def _follows_script(seq: Sequence) -> bool:
    """Whether all of the output is as the request's drafts say, and some of these are left."""
    script, num_output = seq.request.draft_tokens, seq.num_output_tokens
    return 0 < num_output < len(script) and seq.token_ids[seq.num_prompt_tokens :] == script[:num_output]
