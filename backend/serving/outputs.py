"""Turns the Results of one row of a request into the named arrays of Triton responses.

Only the row's sender thread uses a RowOutput. `feed` takes in the engine's Results in order. `render` returns everything
that came since the last `render` that returned something, so that responses coalesce:

    feed(t1)  render -> t1      feed(t2)  feed(t3)  render -> t2 t3      feed(end)  render(final) -> the rest

`render(final=True)` always returns arrays, even empty ones, because the end of a row is sent with a data response.
`render(final=False)` returns None when there is nothing to send yet. All arrays have a leading batch dimension of 1, and one
beam.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from backend.api import FinishReason, PerfMetrics, Result
from backend.api.response import TopLogProb
from backend.text.stream import TextStream

Arrays = list[tuple[str, NDArray[Any]]]


class RowSettings(NamedTuple):
    """How a row is to be answered, as its request says."""

    streaming: bool = False
    num_input_tokens: int = 0
    batch_index: int | None = None  # the row's number, or None when the request has only one row
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False


class RowOutput(Protocol):
    def feed(self, result: Result) -> int | None:
        """Take in one Result.

        A returned number says that the text has ended by itself after that many output tokens, so that the engine is to
        be stopped there.
        """
        ...

    def render(self, final: bool) -> Arrays | None:
        """The arrays of the next response; None when there is nothing to send yet, which is never so when `final`."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """How many generated tokens the client has been told of, or will be with the next response."""
        ...


class Progress:
    """The tokens, log-probabilities and metrics of one row since its last response. Both kinds of output use it."""

    def __init__(self, settings: RowSettings):
        self.settings = settings
        self.ids: list[int] = []
        self.log_probs: list[float] | None = None
        self.cum_log_prob: float | None = None
        self.top_log_probs: list[list[TopLogProb]] | None = None
        self.perf: PerfMetrics | None = None
        self.num_tokens = 0

    def add(self, result: Result, num_kept: int | None = None) -> list[int]:
        """Take in the first `num_kept` tokens of a result, or all of them when it is None, and return them."""
        ids = result.output_token_ids[0] if result.output_token_ids else []
        kept = ids if num_kept is None else ids[:num_kept]
        self.ids.extend(kept)
        self.num_tokens += len(kept)
        if result.log_probs is not None:
            new = result.log_probs[0][: len(kept)]
            self.log_probs = [*(self.log_probs or []), *new]
            self.cum_log_prob = (self.cum_log_prob or 0.0) + sum(new)
        if result.top_log_probs is not None:
            self.top_log_probs = [*(self.top_log_probs or []), *result.top_log_probs[: len(kept)]]
        self.perf = result.perf_metrics or self.perf
        return kept

    def take(self) -> Arrays:
        """Return the arrays that both kinds of model send, and forget what has been returned."""
        settings, ids, log_probs = self.settings, self.ids, self.log_probs
        arrays: Arrays = []
        if log_probs is not None:
            arrays.append(("cum_log_probs", np.array([[self.cum_log_prob]], np.float32)))
            arrays.append(("output_log_probs", np.array([[log_probs]], np.float32)))
            self.log_probs = []
        if self.top_log_probs is not None:
            arrays.extend(_top_arrays(self.top_log_probs))
            self.top_log_probs = []
        if settings.batch_index is not None:
            arrays.append(_number("batch_index", settings.batch_index))
        if settings.return_num_input_tokens:
            arrays.append(_number("num_input_tokens", settings.num_input_tokens))
        if settings.return_num_output_tokens:
            arrays.append(_number("num_output_tokens", len(ids)))
        if self.perf is not None:
            arrays.extend(_perf_arrays(self.perf))
        self.ids = []
        return arrays


class TokenOutput:
    """Sends token ids as the engine made them.

    `prompt_ids` come first in the only response of a row that does not stream.
    """

    def __init__(self, settings: RowSettings, prompt_ids: list[int]):
        self._progress = Progress(settings)
        self._prompt_ids = prompt_ids

    @property
    def num_output_tokens(self) -> int:
        return self._progress.num_tokens

    def feed(self, result: Result) -> int | None:
        self._progress.add(result)
        return None

    def render(self, final: bool) -> Arrays | None:
        progress = self._progress
        if not final and not (progress.settings.streaming and progress.ids):
            return None
        ids = self._prompt_ids + progress.ids
        return [
            ("output_ids", np.array(ids, np.int32).reshape(1, 1, -1)),
            ("sequence_length", np.array([[len(ids)]], np.int32)),
            *progress.take(),
        ]


class TextOutput:
    """Detokenises, and sends text. A stop string ends the text, and its tokens are the last that are counted.

    `prefix` comes first in the only response of a row that does not stream; it is the prompt if the client wants that back.
    With `accumulate`, each streamed response holds the whole text so far.
    """

    def __init__(self, settings: RowSettings, stream: TextStream, prefix: str = "", accumulate: bool = False):
        self._progress = Progress(settings)
        self._stream = stream
        self._prefix = prefix
        self._accumulate = accumulate
        self._text = ""  # the text since the last response, or the whole text with `accumulate`
        self._fresh = False  # whether text has come since the last response
        self._finish: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return self._progress.num_tokens

    def feed(self, result: Result) -> int | None:
        if self._finish == "stop":
            # The engine went on until it heard of the stop string. These tokens do not count, but its metrics do.
            self._progress.add(result, num_kept=0)
            return None
        before = self._progress.num_tokens
        ids = result.output_token_ids[0] if result.output_token_ids else []
        delta = self._stream.push(ids)
        self._append(delta.text)
        ended = delta.finished_by is not None
        if result.is_final and not ended:
            delta = self._stream.flush()
            self._append(delta.text)
            ended = delta.finished_by is not None
        # A stop string may end before tokens that an earlier response has counted already. They stay counted.
        self._progress.add(result, num_kept=max(0, delta.num_tokens_kept - before) if ended else None)
        if ended:
            self._finish = "stop"
            return None if result.is_final else delta.num_tokens_kept
        if result.is_final:
            self._finish = FinishReason(result.finish_reasons[0]).openai_name
        return None

    def render(self, final: bool) -> Arrays | None:
        # After a stop string the last text waits for the engine to end the row, and is sent with that end.
        if not final and not (self._progress.settings.streaming and self._fresh and self._finish is None):
            return None
        arrays: Arrays = [("text_output", _text(self._prefix + self._text))]
        if final and self._finish is not None:
            arrays.append(("finish_reason", _text(self._finish)))
        if not self._accumulate:
            self._text = ""
        self._fresh = False
        return arrays + self._progress.take()

    def _append(self, text: str) -> None:
        self._text += text
        self._fresh = self._fresh or bool(text)


def _text(text: str) -> NDArray[np.object_]:
    return np.array([[text.encode("utf-8", "replace")]], dtype=np.object_)


def _number(name: str, value: float, dtype: type[np.generic] = np.int32) -> tuple[str, NDArray[Any]]:
    return name, np.array([[value]], dtype)


def _top_arrays(positions: list[list[TopLogProb]]) -> Arrays:
    """Two arrays of shape [1, tokens, n]: the n most likely tokens of each position, and their log-probabilities."""
    shape = (1, len(positions), len(positions[0]) if positions else 0)
    ids = [entry.token_id for entries in positions for entry in entries]
    log_probs = [entry.log_prob for entries in positions for entry in entries]
    return [
        ("top_log_probs_ids", np.array(ids, np.int32).reshape(shape)),
        ("top_log_probs", np.array(log_probs, np.float32).reshape(shape)),
    ]


def _perf_arrays(perf: PerfMetrics) -> Arrays:
    return [
        _number("kv_cache_alloc_new_blocks", perf.num_new_blocks),
        _number("kv_cache_reused_blocks", perf.num_reused_blocks),
        _number("kv_cache_alloc_total_blocks", perf.num_new_blocks + perf.num_reused_blocks),
        _number("arrival_time_ns", perf.arrival_ns, np.int64),
        _number("first_scheduled_time_ns", perf.first_scheduled_ns, np.int64),
        _number("first_token_time_ns", perf.first_token_ns, np.int64),
        _number("last_token_time_ns", perf.last_token_ns, np.int64),
        _number("acceptance_rate", 0.0, np.float32),  # This version does not speculate, so it accepts no draft tokens.
        _number("total_accepted_draft_tokens", 0),
        _number("total_draft_tokens", 0),
        _number("num_cached_tokens", perf.num_cached_tokens),
        _number("num_context_tokens", perf.num_context_tokens),
        _number("num_recomputed_tokens", perf.num_recomputed_tokens),
    ]
