"""Outputs of the model `turbomind`: every response holds all tokens of the session, history and prompt included."""

from __future__ import annotations

import logging
from array import array

import numpy as np

from backend.api import FinishReason, Result, SessionConfig
from backend.serving.work import Arrays

log = logging.getLogger("everbatch.serving")


class TurbomindOutput:
    """A RowOutput. The history comes with the engine's first Result; it is kept in four bytes a token while the turn runs."""

    def __init__(self, prompt: list[int], session: SessionConfig | None = None) -> None:
        self._prompt = prompt
        self._session = session
        self._ids = array("I")
        self._num_before = 0  # tokens before the output
        self._log_probs: list[float] | None = None
        self._is_fresh = False
        self.finish: FinishReason | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self._ids) - self._num_before

    def feed(self, result: Result) -> int | None:
        if result.history_token_ids is not None:
            self._begin(result.history_token_ids)
        new = result.output_token_ids[0] if result.output_token_ids else []
        self._ids.extend(new)
        self._is_fresh = self._is_fresh or bool(new)
        if result.log_probs is not None:
            self._log_probs = self._log_probs or []
            self._log_probs.extend(result.log_probs[0])
        if result.is_final:
            self.finish = FinishReason(result.finish_reasons[0])
        return None

    def render(self) -> list[Arrays]:
        if self.finish is None and not self._is_fresh:
            return []
        self._is_fresh = False
        arrays: Arrays = [
            ("output_ids", np.array(self._ids, np.uint32).reshape(1, 1, -1)),
            ("sequence_length", np.array([[len(self._ids)]], np.uint32)),
        ]
        if self._log_probs is not None:
            arrays.append(("cum_log_probs", np.array([[sum(self._log_probs)]], np.float32)))
            arrays.append(("output_log_probs", np.array([[self._log_probs]], np.float32)))
        return [arrays]

    def _begin(self, history: list[int]) -> None:
        session = self._session
        if session is not None and session.step is not None and session.step > len(history):
            log.warning(
                "session %d: step is %d, the session has %d tokens; it goes on at its end",
                session.id,
                session.step,
                len(history),
            )
        self._ids = array("I", history)
        self._ids.extend(self._prompt)
        self._num_before = len(self._ids)
