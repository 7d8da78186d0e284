"""ThinkingMatcher: the Matcher of an output that begins with reasoning. Behind it the guide's own matcher, if any, takes over."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backend.api.guide import Thinking
from backend.core.thinking import Phase, ReasoningPlace, ThinkingCourse
from backend.guided.protocol import Matcher, bits_of


class ThinkingMatcher:
    def __init__(self, thinking: Thinking, matcher: Matcher | None) -> None:
        """matcher: of the answer, at its beginning; None: the answer may be anything."""
        self._course = ThinkingCourse(thinking, is_guided=matcher is not None)
        self._matcher = matcher
        self._start_bits = bits_of(thinking.start_ids[:1])
        self._places: list[ReasoningPlace] = [
            self._course.beginning
        ]  # behind each token, as many as can be rolled back

    @property
    def _place(self) -> ReasoningPlace:
        return self._places[-1]

    def fill(self, masks: NDArray[np.int32], row: int) -> None:
        forced = self._course.forced(self._place)
        if forced is not None:
            masks[row] = 0
            for word, bit in bits_of([forced]):
                masks[row, word] = bit
        elif self._matcher is None or self._place.phase is Phase.THINK:
            masks[row] = -1
        else:
            self._matcher.fill(masks, row)
            for word, bit in self._start_bits if self._place.phase is Phase.START else ():
                masks[row, word] |= bit

    def accept(self, token_id: int) -> bool:
        place = self._course.after(self._place, token_id)
        if place is None:
            return False
        if self._matcher is not None and self._is_of_answer(place) and not self._matcher.accept(token_id):
            return False
        self._places.append(place)
        return True

    def _is_of_answer(self, after: ReasoningPlace) -> bool:
        """True if the token that leads there belongs to the answer."""
        return after.phase is Phase.ANSWER and self._place.phase in (Phase.START, Phase.ANSWER)

    def rollback(self, num_tokens: int) -> None:
        num_of_answer = 0
        for _ in range(num_tokens):
            after = self._places.pop()
            num_of_answer += self._is_of_answer(after)
        if self._matcher is not None and num_of_answer:
            self._matcher.rollback(num_of_answer)

    @property
    def is_complete(self) -> bool:
        if self._matcher is None:
            return self._course.forced(self._place) is None
        return self._place.phase in (Phase.START, Phase.ANSWER) and self._matcher.is_complete

    @property
    def error(self) -> str:
        return "" if self._matcher is None else self._matcher.error
