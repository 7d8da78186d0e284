"""Values that TensorRT-LLM repeats with each response of a stream, and this project's engine sends once."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from backend.api import Request
from compat.trtllm.results import Response, Result


class _Sequence:
    """Values that the responses of one sequence have held so far."""

    def __init__(self) -> None:
        self.log_probs: list[float] = []
        self.context_logits: Any = None


class _Stream:
    """`adds_up`: the engine sends log-probabilities of new tokens only, and they are collected here."""

    def __init__(self, adds_up: bool) -> None:
        self.adds_up = adds_up
        self.sequences: defaultdict[int, _Sequence] = defaultdict(_Sequence)


class Repeats:
    """Completes the responses of streams: each has the log-probabilities of all tokens so far, and the context logits.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self.adding = threading.Lock()  # held while a request is sent, until its id is in the table
        self._streams: dict[int, _Stream] = {}

    def add(self, request_id: int, request: Request) -> None:
        """Register a stream that asks for log-probabilities or context logits.

        Where each response has all tokens, the engine itself sends the log-probabilities of all tokens.
        """
        output = request.output_config
        tells_all = request.return_all_generated_tokens or request.sampling_config.beam_width > 1
        if request.streaming and (output.return_log_probs or output.return_context_logits):
            self._streams[request_id] = _Stream(adds_up=not tells_all)

    def complete(self, response: Response, is_final: bool) -> Response:
        """The response with the values of earlier responses. The final response of a request removes it from the table."""
        with self.adding:
            stream = (
                self._streams.pop(response.request_id, None) if is_final else self._streams.get(response.request_id)
            )
            if stream is not None and not response.has_error():
                _repeat(stream, response.result)
        return response


def _repeat(stream: _Stream, result: Result) -> None:
    before = stream.sequences[result.sequence_index]
    if stream.adds_up and result.log_probs is not None:
        before.log_probs += result.log_probs[0]
        result.log_probs = [before.log_probs]  # a Result copies its arguments
    if result.context_logits is None:
        result.context_logits = before.context_logits
    before.context_logits = result.context_logits
