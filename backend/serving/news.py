"""What is new of one sequence of a row, from the engine's Results of it: a Reporter for ids, and one for text.

Only the row's sender thread uses a Reporter. `feed` takes in the engine's Results in order. `take` hands over everything that
came since the last `take`, so that responses coalesce:

    feed(t1)  take -> t1      feed(t2)  feed(t3)  take -> t2 t3      feed(end)  take -> the rest

`is_due` says whether there is something to be told of the sequence now. Its end always is, once, be it empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from backend.api import FinishReason, PerfMetrics, Result
from backend.api.response import PromptLogProb, TopLogProb
from backend.api.tensor import TensorData
from backend.text.stream import TextStream


class News(NamedTuple):
    """What one response tells of a sequence: everything since the one before it. Text is empty where a row is ids only."""

    text: str
    ids: list[int]
    log_probs: list[float] | None  # of `ids`; None: not asked for
    cum_log_prob: float | None  # of all tokens so far
    top_log_probs: list[list[TopLogProb]] | None  # of `ids`, the most likely first
    perf: PerfMetrics | None
    finish: FinishReason | None  # why the sequence has ended; None while it goes on
    stop: str | int | None  # the stop string or the end id that ended it
    num_tokens: int  # output tokens so far
    sequence: int = 0  # which one of the row's sequences, or of its beams
    prompt_log_probs: list[PromptLogProb] | None = None  # from the prompt's second token on
    context_logits: NDArray[np.float32] | None = None  # [positions of the prompt, vocabulary]
    generation_logits: NDArray[np.float32] | None = None  # [as many as `ids`, vocabulary]


class Reporter(Protocol):
    def feed(self, result: Result) -> int | None:
        """Take in one Result of the sequence.

        A returned number says that the text has ended by itself after that many output tokens, so that the engine is to
        stop the sequence there.
        """
        ...

    def take(self) -> News: ...

    @property
    def is_due(self) -> bool: ...

    @property
    def has_ended(self) -> bool:
        """True if the engine has ended the sequence."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """How many generated tokens the client has been told of, or will be with the next response."""
        ...

    @property
    def finish(self) -> FinishReason | None:
        """How the client is told that the sequence has ended; None while it goes on."""
        ...


class Progress:
    """Tokens, log-probabilities, logits and metrics of one sequence since the last response."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.log_probs: list[float] | None = None
        self.cum_log_prob: float | None = None
        self.top_log_probs: list[list[TopLogProb]] | None = None
        self.prompt_log_probs: list[PromptLogProb] | None = None
        self.perf: PerfMetrics | None = None
        self.finish: FinishReason | None = None
        self.stop: str | int | None = None
        self.num_tokens = 0
        self.has_ended = False
        self._has_told_end = False
        self._context_logits: list[NDArray[np.float32]] = []
        self._generation_logits: list[NDArray[np.float32]] = []

    @property
    def owes_end(self) -> bool:
        """True if the sequence has ended and that has not been told."""
        return self.has_ended and not self._has_told_end

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
        self.prompt_log_probs = result.prompt_log_probs or self.prompt_log_probs
        if result.context_logits is not None:
            self._context_logits.append(_array(result.context_logits))
        if result.generation_logits is not None:
            self._generation_logits.append(_array(result.generation_logits)[0, : len(kept)])
        self.perf = result.perf_metrics or self.perf
        self.has_ended = result.is_final or result.is_sequence_final

    def finish_as(self, result: Result) -> None:
        """Note how the engine ended the sequence."""
        self.finish = FinishReason(result.finish_reasons[0])
        if self.finish is FinishReason.END_ID and self.ids:
            self.stop = self.ids[-1]

    def take(self, text: str) -> News:
        """What is new, which is taken out. How the sequence ended is told once it has ended in the engine, too."""
        news = News(
            text,
            self.ids,
            self.log_probs,
            self.cum_log_prob,
            self.top_log_probs,
            self.perf,
            self.finish if self.has_ended else None,
            self.stop if self.has_ended else None,
            self.num_tokens,
            prompt_log_probs=self.prompt_log_probs,
            context_logits=_joined(self._context_logits),
            generation_logits=_joined(self._generation_logits),
        )
        self.ids, self.prompt_log_probs = [], None
        self.log_probs = None if self.log_probs is None else []
        self.top_log_probs = None if self.top_log_probs is None else []
        self._context_logits, self._generation_logits = [], []
        self._has_told_end = self.has_ended
        return news


def _array(tensor: TensorData) -> NDArray[np.float32]:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


def _joined(parts: list[NDArray[np.float32]]) -> NDArray[np.float32] | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return np.concatenate(parts)


class _Counted:
    """What both kinds of Reporter know of their sequence."""

    def __init__(self, streaming: bool) -> None:
        self._progress = Progress()
        self._streaming = streaming

    @property
    def num_output_tokens(self) -> int:
        return self._progress.num_tokens

    @property
    def finish(self) -> FinishReason | None:
        return self._progress.finish

    @property
    def has_ended(self) -> bool:
        return self._progress.has_ended


class TokenReporter(_Counted):
    """Token ids, as the engine made them."""

    @property
    def is_due(self) -> bool:
        return self._progress.owes_end or (self._streaming and bool(self._progress.ids))

    def feed(self, result: Result) -> int | None:
        self._progress.add(result)
        if self.has_ended:
            self._progress.finish_as(result)
        return None

    def take(self) -> News:
        return self._progress.take("")


class TextReporter(_Counted):
    """Detokenises. A stop string ends the text, and its tokens are the last that are counted.

    `prefix`: text in front of all that is told (the prompt, when asked for). `accumulate`: each `take` has the whole text so
    far. `every_token`: a token whose text is held back (half a character, what may become a stop string) is told all the
    same, with the text that is there. `hidden_ends`: end ids whose own text is not part of the output.
    """

    def __init__(
        self,
        stream: TextStream,
        *,
        streaming: bool,
        prefix: str = "",
        accumulate: bool = False,
        every_token: bool = False,
        hidden_ends: Sequence[int] = (),
    ) -> None:
        super().__init__(streaming)
        self._stream = stream
        self._accumulate = accumulate
        self._every_token = every_token
        self._hidden_ends = hidden_ends
        self._text = prefix  # since the last response, or since the beginning with `accumulate`
        self._fresh = False  # text has come since the last response

    @property
    def is_due(self) -> bool:
        # After a stop string the last text waits for the engine's end of the sequence, which rides on it.
        has_news = (
            self._fresh
            or self._progress.prompt_log_probs is not None
            or (self._every_token and bool(self._progress.ids))
        )
        return self._progress.owes_end or (self._streaming and has_news and self.finish is None)

    def feed(self, result: Result) -> int | None:
        progress = self._progress
        if progress.finish is not None:
            # The engine had gone on before it heard of the stop string; its metrics still count.
            progress.add(result, num_kept=0)
            return None
        is_end = result.is_final or result.is_sequence_final
        before = progress.num_tokens
        ids = result.output_token_ids[0] if result.output_token_ids else []
        is_hidden = is_end and bool(ids) and ids[-1] in self._hidden_ends and _ended_by_id(result)
        delta = self._stream.push(ids[:-1] if is_hidden else ids)
        self._append(delta.text)
        ended = delta.finished_by is not None
        if is_end and not ended:
            delta = self._stream.flush()
            self._append(delta.text)
            ended = delta.finished_by is not None
        # A stop string may end before tokens that an earlier response has already counted; they stay counted. Where each
        # token is told, so is the one that has shown the stop string.
        least = 1 if self._every_token else 0
        progress.add(result, num_kept=max(least, delta.num_tokens_kept - before) if ended else None)
        if ended:
            progress.finish, progress.stop = FinishReason.STOP_WORDS, delta.finished_by
            return None if is_end else delta.num_tokens_kept
        if is_end:
            progress.finish_as(result)
        return None

    def take(self) -> News:
        text = self._text
        if not self._accumulate:
            self._text = ""
        self._fresh = False
        return self._progress.take(text)

    def _append(self, text: str) -> None:
        self._text += text
        self._fresh = self._fresh or bool(text)


def _ended_by_id(result: Result) -> bool:
    return result.finish_reasons[0] == FinishReason.END_ID
