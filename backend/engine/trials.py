"""Trials: a request that was running when engines ended runs alone, so that one more end shows if it is the cause.

    suspect   its client says so (Resume.trial_tokens): it was in flight at two ends of engines in a row
    trial     all others are set aside; it runs until each of its sequences has so many new tokens, or to its end
    after it  it goes on among the others; where the engine ends during the trial, the client ends the request with an error

Suspects have their trials one after the other, in the order of arrival. All clients and the supervisor hear when a trial
begins and ends: an end of the engine within it is that request's alone.
"""

from __future__ import annotations

from backend.api.request import RequestId
from backend.engine.core import EngineCore


class Trials:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._num_tokens = 0  # new tokens of each sequence that end the trial; 0: only its own end does
        self._begins: dict[int, int] = {}  # output tokens of its sequences when the trial began, by their indices
        self.request_id: RequestId | None = None  # the request on trial; any thread may read it

    def advance(self) -> bool:
        """End a trial that is over, and begin the next. Returns True if another request is on trial than before, or none."""
        before = self.request_id
        if before is not None and self._is_over(before):
            self._set(None)
        if self.request_id is None:
            waiting = self._core.preparation.begin_trial()
            if waiting is not None:
                assert waiting.resume is not None  # it says that the request is a suspect
                self._num_tokens = waiting.resume.trial_tokens or 0
                self._begins = dict(enumerate(len(each.token_ids) for each in waiting.resume.delivered))
                self._set(waiting.request_id)
        return self.request_id != before

    def _is_over(self, request_id: RequestId) -> bool:
        scheduler = self._core.scheduler
        live = [seq for seq in (*scheduler.running, *scheduler.waiting) if seq.request_id == request_id]
        if not live:
            return request_id not in self._core.preparation
        if not self._num_tokens:
            return False
        begins = self._begins
        return all(seq.num_output_tokens - begins.get(seq.sequence_index, 0) >= self._num_tokens for seq in live)

    def _set(self, request_id: RequestId | None) -> None:
        self.request_id = self._core.scheduler.only = request_id
