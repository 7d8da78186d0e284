"""A streaming request of a benchmark: its tokens, and when each response came."""

from __future__ import annotations

import threading
import time

from backend.api import OutputConfig, Request, Response
from backend.executor import Executor


class Stream:
    """One request, sent when the object is made. Times are seconds of time.perf_counter."""

    def __init__(self, executor: Executor, prompt: list[int], max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []  # of the responses
        self._error = ""
        self._has_ended = False
        self._changed = threading.Condition()
        self.began = time.perf_counter()
        output = OutputConfig(exclude_input_from_output=True)
        executor.submit(Request(prompt, max_tokens, streaming=True, output_config=output), self._hear)

    @property
    def first_token_ms(self) -> float:
        return (self.times[0] - self.began) * 1e3

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def wait_for(self, num_tokens: int) -> None:
        """Block until so many tokens have come, or the request has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or len(self.tokens) >= num_tokens)

    def result(self) -> list[int]:
        """Block until the request has ended; return its tokens. Raises SystemExit with the error that ended it."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended)
        if self._error:
            raise SystemExit(f"a request ended with an error: {self._error}")
        return self.tokens

    def _hear(self, response: Response) -> None:
        with self._changed:
            if response.has_error():
                self._error = response.error_msg
            else:
                self.times.append(time.perf_counter())
                self.tokens += response.result.output_token_ids[0]
            self._has_ended = response.is_final
            self._changed.notify_all()
