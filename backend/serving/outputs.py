"""Turns the Results of one row of a request into the named arrays of Triton responses.

Only the row's sender thread uses a RowOutput. `feed` takes in the engine's Results in order. `render` returns everything
that came since the last `render` that returned something, so that responses coalesce:

    feed(t1)  render -> t1      feed(t2)  feed(t3)  render -> t2 t3      feed(end)  render(final) -> the rest

`render(final=True)` always returns arrays, be they empty: the end of a row rides on a data response. Otherwise None
means that there is nothing to say yet. What the arrays are called and how they are shaped is the front's: a function
from News to Arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from backend.api import FinishReason, PerfMetrics, Result
from backend.api.response import TopLogProb
from backend.text.stream import TextStream

Arrays = list[tuple[str, NDArray[Any]]]


class News(NamedTuple):
    """What one response tells of a row: everything since the one before it. Text is empty where a row is ids only."""

    text: str
    ids: list[int]
    log_probs: list[float] | None  # of `ids`; None: not asked for
    cum_log_prob: float | None  # of all tokens so far
    top_log_probs: list[list[TopLogProb]] | None  # of `ids`, the most likely first
    perf: PerfMetrics | None
    finish: FinishReason | None  # why the row has ended; None while it goes on
    stop: str | int | None  # the stop string or the end id that ended it
    num_tokens: int  # output tokens so far


Render = Callable[[News], Arrays]


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

    @property
    def finish(self) -> FinishReason | None:
        """How the client is told that the row has ended; None while it goes on, or where it is told nothing of the kind."""
        ...


class Progress:
    """Tokens, log-probabilities and metrics of one row since the last response."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.log_probs: list[float] | None = None
        self.cum_log_prob: float | None = None
        self.top_log_probs: list[list[TopLogProb]] | None = None
        self.perf: PerfMetrics | None = None
        self.finish: FinishReason | None = None
        self.stop: str | int | None = None
        self.num_tokens = 0

    def add(self, result: Result, num_kept: int | None = None) -> None:
        """Take in a result's first `num_kept` tokens (all when None)."""
        ids = result.output_token_ids[0] if result.output_token_ids else []
        kept = ids if num_kept is None else ids[:num_kept]
        self.ids.extend(kept)
        self.num_tokens += len(kept)
        if result.log_probs is not None:
            new = result.log_probs[0][: len(kept)]
            self.log_probs = self.log_probs or []
            self.log_probs.extend(new)
            self.cum_log_prob = (self.cum_log_prob or 0.0) + sum(new)
        if result.top_log_probs is not None:
            self.top_log_probs = self.top_log_probs or []
            self.top_log_probs.extend(result.top_log_probs[: len(kept)])
        self.perf = result.perf_metrics or self.perf

    def finish_as(self, result: Result) -> None:
        """Note how the engine ended the row."""
        self.finish = FinishReason(result.finish_reasons[0])
        if self.finish is FinishReason.END_ID and self.ids:
            self.stop = self.ids[-1]

    def take(self, text: str, final: bool) -> News:
        """What is new, which is taken out. How a row ended is told by its last response."""
        news = News(
            text,
            self.ids,
            self.log_probs,
            self.cum_log_prob,
            self.top_log_probs,
            self.perf,
            self.finish if final else None,
            self.stop if final else None,
            self.num_tokens,
        )
        self.ids = []
        self.log_probs = None if self.log_probs is None else []
        self.top_log_probs = None if self.top_log_probs is None else []
        return news


class TokenOutput:
    """Token ids, as the engine made them."""

    def __init__(self, render: Render, streaming: bool) -> None:
        self._progress = Progress()
        self._render = render
        self._streaming = streaming

    @property
    def num_output_tokens(self) -> int:
        return self._progress.num_tokens

    @property
    def finish(self) -> FinishReason | None:
        return self._progress.finish

    def feed(self, result: Result) -> int | None:
        self._progress.add(result)
        if result.is_final:
            self._progress.finish_as(result)
        return None

    def render(self, final: bool) -> Arrays | None:
        if not final and not (self._streaming and self._progress.ids):
            return None
        return self._render(self._progress.take("", final))


class TextOutput:
    """Detokenises, and sends text. A stop string ends the text, and its tokens are the last that are counted.

    `prefix`: text in front of the only response of a row that does not stream (the prompt, when asked for).
    `accumulate`: each streamed response holds the whole text so far. `every_token`: a token whose text is held back (half
    a character, what may become a stop string) is told all the same, with the text that is there. `hidden_ends`: end ids
    whose own text is not part of the output.
    """

    def __init__(
        self,
        render: Render,
        stream: TextStream,
        *,
        streaming: bool,
        prefix: str = "",
        accumulate: bool = False,
        every_token: bool = False,
        hidden_ends: Sequence[int] = (),
    ) -> None:
        self._progress = Progress()
        self._render = render
        self._stream = stream
        self._streaming = streaming
        self._prefix = prefix
        self._accumulate = accumulate
        self._every_token = every_token
        self._hidden_ends = hidden_ends
        self._text = ""  # since the last response, or since the beginning with `accumulate`
        self._fresh = False  # text has come since the last response

    @property
    def num_output_tokens(self) -> int:
        return self._progress.num_tokens

    @property
    def finish(self) -> FinishReason | None:
        return self._progress.finish

    def feed(self, result: Result) -> int | None:
        progress = self._progress
        if (
            progress.finish is not None
        ):  # the engine had gone on before it heard of the stop string; its metrics still count
            progress.add(result, num_kept=0)
            return None
        before = progress.num_tokens
        ids = result.output_token_ids[0] if result.output_token_ids else []
        is_hidden = result.is_final and bool(ids) and ids[-1] in self._hidden_ends and _ended_by_id(result)
        delta = self._stream.push(ids[:-1] if is_hidden else ids)
        self._append(delta.text)
        ended = delta.finished_by is not None
        if result.is_final and not ended:
            delta = self._stream.flush()
            self._append(delta.text)
            ended = delta.finished_by is not None
        # A stop string may end before tokens that an earlier response has already counted; they stay counted. Where each
        # token is told, so is the one that has shown the stop string.
        least = 1 if self._every_token else 0
        progress.add(result, num_kept=max(least, delta.num_tokens_kept - before) if ended else None)
        if ended:
            progress.finish, progress.stop = FinishReason.STOP_WORDS, delta.finished_by
            return None if result.is_final else delta.num_tokens_kept
        if result.is_final:
            progress.finish_as(result)
        return None

    def render(self, final: bool) -> Arrays | None:
        # after a stop string the last text waits for the engine's end of the row: the end rides on it
        if not final and not (self._streaming and self._has_news and self._progress.finish is None):
            return None
        text = self._prefix + self._text
        if not self._accumulate:
            self._text = ""
        self._fresh = False
        return self._render(self._progress.take(text, final))

    @property
    def _has_news(self) -> bool:
        return self._fresh or (self._every_token and bool(self._progress.ids))

    def _append(self, text: str) -> None:
        self._text += text
        self._fresh = self._fresh or bool(text)


def _ended_by_id(result: Result) -> bool:
    return result.finish_reasons[0] == FinishReason.END_ID


class Answer:
    """The output of a row that needs no engine: what it has to say is known."""

    num_output_tokens = 0
    finish = None

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def feed(self, result: Result) -> int | None:
        return None

    def render(self, final: bool) -> Arrays | None:
        return self._arrays if final else None


def text_array(texts: Sequence[str | bytes]) -> NDArray[Any]:
    """A STRING tensor in one dimension. A lone surrogate, which no UTF-8 can hold, becomes a question mark."""
    encoded = [text if isinstance(text, bytes) else text.encode("utf-8", "replace") for text in texts]
    return np.array(encoded, dtype=np.object_)
