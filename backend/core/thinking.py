r"""Where an output stands in its reasoning: a function of its token ids, so that it survives eviction and replay.

START --start_ids--> THINK --end_ids--> (FOLLOW --follow_ids-->) ANSWER
  \--any other token--------------------------------------------^
THINK --max_tokens--> CLOSE --end_ids--> (FOLLOW --follow_ids-->) ANSWER
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from backend.api.guide import Thinking


class Phase(enum.Enum):
    START = enum.auto()  # the output may be about to begin with start_ids
    THINK = enum.auto()
    CLOSE = enum.auto()  # the budget is used up: the rest of end_ids must follow
    FOLLOW = enum.auto()  # follow_ids must follow
    ANSWER = enum.auto()


class ReasoningPlace(NamedTuple):
    phase: Phase
    matched: int = 0  # tokens of the mark that the phase is about
    thought: int = 0  # tokens of the reasoning, those of end_ids as far as they are matched included


_ANSWER = ReasoningPlace(Phase.ANSWER)


class ThinkingCourse:
    """The places of outputs with this reasoning. `is_guided`: a guide applies behind it."""

    def __init__(self, thinking: Thinking, is_guided: bool) -> None:
        self.thinking, self._is_guided = thinking, is_guided
        self._must_start = is_guided and thinking.is_always
        self._fallbacks = _fallbacks(thinking.end_ids)

    @property
    def beginning(self) -> ReasoningPlace:
        return ReasoningPlace(Phase.START) if self.thinking.start_ids else self._thinking(0, 0)

    def forced(self, place: ReasoningPlace) -> int | None:
        """The only token that may follow; None if there are others."""
        match place.phase:
            case Phase.START if self._must_start or (self._is_guided and place.matched):
                return self.thinking.start_ids[place.matched]
            case Phase.CLOSE:
                return self.thinking.end_ids[place.matched]
            case Phase.FOLLOW:
                return self.thinking.follow_ids[place.matched]
        return None

    def after(self, place: ReasoningPlace, token_id: int) -> ReasoningPlace | None:
        """The place behind a token; None if the token may not follow."""
        if (forced := self.forced(place)) is not None and token_id != forced:
            return None
        match place.phase:
            case Phase.START:
                return self._after_start(place, token_id)
            case Phase.THINK:
                return self._after_thought(place, token_id)
            case Phase.CLOSE:
                matched = place.matched + 1
                is_closed = matched == len(self.thinking.end_ids)
                return self._ended(True) if is_closed else place._replace(matched=matched)
            case Phase.FOLLOW:
                matched = place.matched + 1
                return _ANSWER if matched == len(self.thinking.follow_ids) else place._replace(matched=matched)
        return place

    def _after_start(self, place: ReasoningPlace, token_id: int) -> ReasoningPlace:
        start = self.thinking.start_ids
        if token_id != start[place.matched]:
            return _ANSWER
        if place.matched + 1 < len(start):
            return place._replace(matched=place.matched + 1)
        return self._thinking(0, 0)

    def _after_thought(self, place: ReasoningPlace, token_id: int) -> ReasoningPlace:
        end, matched = self.thinking.end_ids, place.matched
        while matched and end[matched] != token_id:
            matched = self._fallbacks[matched]
        matched += end[matched] == token_id
        return self._ended(False) if matched == len(end) else self._thinking(matched, place.thought + 1)

    def _thinking(self, matched: int, thought: int) -> ReasoningPlace:
        """Within the reasoning. What may be the beginning of end_ids counts, so that the budget ends it in any case."""
        limit = self.thinking.max_tokens
        is_used_up = limit is not None and thought >= limit
        return ReasoningPlace(Phase.CLOSE, matched) if is_used_up else ReasoningPlace(Phase.THINK, matched, thought)

    def _ended(self, by_budget: bool) -> ReasoningPlace:
        """Behind end_ids. What follows them by itself is left to the model where nothing depends on it."""
        has_follow = self.thinking.follow_ids and (self._is_guided or by_budget)
        return ReasoningPlace(Phase.FOLLOW) if has_follow else _ANSWER


def _fallbacks(end: Sequence[int]) -> list[int]:
    """For each n: how many of the first tokens of `end` are also the last ones of its first n tokens, n itself aside."""
    found = [0] * (len(end) + 1)
    for n in range(2, len(end) + 1):
        matched = found[n - 1]
        while matched and end[matched] != end[n - 1]:
            matched = found[matched]
        found[n] = matched + (end[matched] == end[n - 1])
    return found


class ReasoningCounter:
    """Counts the tokens of one output that are its reasoning, the marks included."""

    def __init__(self, thinking: Thinking) -> None:
        plain = Thinking(thinking.end_ids, thinking.start_ids)
        self._course = ThinkingCourse(plain, is_guided=False)  # nothing is forced
        self._place = self._course.beginning
        self._num_before = 0  # tokens of start_ids that have come, while it is not known whether all of them will
        self.count = 0

    def push(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            before, after = self._place.phase, self._course.after(self._place, token_id)
            if after is None or before is Phase.ANSWER:
                return
            self._place = after
            if before is Phase.START:
                self._num_before += 1
                self.count = self._num_before if after.phase is Phase.THINK else 0
            else:
                self.count += 1
