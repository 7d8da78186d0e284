"""OutputAccumulator: tokens, text and log-probabilities of one sequence, from the engine's Results.

    append(result)         the Result holds the new tokens of a sampled sequence
    replace(result, beam)  the Result holds all tokens of all beams so far, and a beam may continue another one than before
    take()                 the changes since the last `take`; several Results may share one

A stop string ends the text at once, while the engine still works on the sequence. Results that follow add metrics only.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import NamedTuple

from backend.api.errors import InvalidRequest
from backend.api.response import FinishReason, PerfMetrics, PromptLogProb, Result, TopLogProb
from backend.text.stream import TextStream


class OutputDelta(NamedTuple):
    """Changes of one sequence. `text` and all lists are new since the last delta; `text` is empty without a TextStream.

    If taken output may be withdrawn, the new text stands behind the first `text_kept` characters, and the new tokens behind
    the first `tokens_kept`; whatever was behind those is withdrawn.
    """

    text: str
    ids: list[int]
    log_probs: list[float] | None  # one for each of `ids`; None: not asked for
    cum_log_prob: float | None  # sum over all tokens so far
    top_log_probs: list[list[TopLogProb]] | None  # for each of `ids` the most likely tokens, in that order
    perf: PerfMetrics | None
    finish: FinishReason | None  # why the sequence ended; None while the engine works on it
    stop: str | int | None  # the stop string or the end id that ended it
    num_tokens: int  # output tokens so far
    sequence: int = 0  # index among the sequences or beams of the request
    prompt_log_probs: list[PromptLogProb] | None = None  # from the prompt's second token on
    with_tensors: Sequence[
        tuple[Result, int]
    ] = ()  # Results with tensors or a state, and how many tokens of each are kept
    tokens_kept: int = 0
    text_kept: int = 0


class OutputAccumulator:
    """State of one sequence. Not thread-safe.

    `stream` None: ids only. `prefix`: text in front of the output. `hidden_ends`: end ids whose own text is not shown.
    `least_kept`: tokens of the Result which completes a stop string that are kept at least.

    After a stop string the tokens up to its end are kept, besides all those of earlier Results. With `may_withdraw` only
    tokens that the shown text needs are kept, and a delta may withdraw tokens that an earlier one has delivered.
    """

    def __init__(
        self,
        stream: TextStream | None = None,
        *,
        prefix: str = "",
        hidden_ends: Sequence[int] = (),
        least_kept: int = 0,
        may_withdraw: bool = False,
    ) -> None:
        self._stream = stream
        self._prefix = prefix
        self._hidden_ends = hidden_ends
        self._least_kept = least_kept
        self._may_withdraw = may_withdraw
        self.perf: PerfMetrics | None = None
        self.prompt_log_probs: list[PromptLogProb] | None = None
        self.has_ended = False  # the engine has ended the sequence
        self.end_is_taken = False  # a delta has reported the end
        self._with_tensors: list[tuple[Result, int]] = []
        self._restart()

    def _restart(self) -> None:
        # Lists and text begin with what is not taken yet; with `may_withdraw` they hold the whole output.
        self.ids: list[int] = []
        self.log_probs: list[float] | None = None
        self.top_log_probs: list[list[TopLogProb]] | None = None
        self.text = self._prefix
        self.num_taken = self._chars_taken = 0  # how much of them is taken: always 0 unless it may be withdrawn
        self.num_tokens = 0
        self.cum_log_prob: float | None = None
        self.has_new_text = False
        self.finish: FinishReason | None = None  # set as soon as the text has ended, maybe ahead of the engine
        self.stop: str | int | None = None

    def append(self, result: Result, beam: int = 0, start: int = 0) -> int | None:
        """Take in the tokens of a Result from index `start` on.

        A returned number says that a stop string has ended the text after that many tokens, where the engine is to end the
        sequence.
        """
        if result.perf_metrics is not None:
            self.perf = result.perf_metrics
        is_end = self.has_ended = result.is_final or result.is_sequence_final
        if self.finish is not None:
            return None
        ids = result.output_token_ids[beam] if result.output_token_ids else []
        if start:
            ids = ids[start:]
        before = self.num_tokens
        self.ids += ids
        self.num_tokens += len(ids)
        self._add_scores(result, beam, start)
        num_kept = None
        if self._stream is not None:
            num_kept = self._read(self._stream, self._shown(ids, result, beam) if is_end else ids, is_end)
        if num_kept is not None:
            self._cut(num_kept if self._may_withdraw else max(before + self._least_kept, num_kept))
        elif is_end:
            self._finish(FinishReason(result.finish_reasons[beam]))
        if _has_tensors(result):
            self._with_tensors.append((result, self.num_tokens - before))
        return None if is_end else num_kept

    def take_up(self, ids: Sequence[int], has_ended: bool = False) -> None:
        """The client has had these tokens with their text, of an answer that another process began; it gets what follows.

        Called before any Result. Raises InvalidRequest where the text ends within them and the client does not say so.
        """
        if has_ended:
            self.has_ended = self.end_is_taken = True
        elif ids:
            self.text = ""  # it has had the prefix, too
        self.num_tokens = len(ids)
        if self._stream is None or has_ended:
            return
        if (stop := self._stream.push(ids).finished_by) is not None:
            raise InvalidRequest(
                f"resume has output with the stop string {stop[:40]!r}, which ends it; mark it as ended"
            )

    def replace(self, result: Result, beam: int) -> None:
        """Take in all tokens of a beam, which may have nothing in common with those before."""
        ids = result.output_token_ids[beam]
        same = len(commonprefix([ids, self.ids]))
        if same < len(self.ids) or self.finish is not None:
            self._restart()
            self._stream = self._stream and self._stream.restarted()
            same = 0
        self.append(result, beam, same)

    def end(self, reason: FinishReason) -> None:
        """End a sequence without new tokens. No effect on one that has ended."""
        if self.finish is not None:
            return
        num_kept = None if self._stream is None else self._read(self._stream, [], True)
        if num_kept is None:
            self._finish(reason)
        else:
            self._cut(num_kept)

    def withdraw(self, count: int) -> None:
        """Remove the last `count` tokens of an output that has ended, and their text. Needs `may_withdraw`."""
        self._cut(self.num_tokens - count)
        if self._stream is not None:
            stream = self._stream.restarted()
            self.text = self._prefix + stream.push(self.ids).text + stream.flush().text

    def take(self) -> OutputDelta:
        """The changes since the last call. The end is part of them once the engine has ended the sequence."""
        ids, text, log_probs, tops = self.ids, self.text, self.log_probs, self.top_log_probs
        start = text_start = 0
        if self._may_withdraw:
            start, text_start = min(self.num_taken, len(ids)), min(self._chars_taken, len(text))
            self.num_taken, self._chars_taken = len(ids), len(text)
            ids, text = ids[start:], text[text_start:]
            log_probs = log_probs and log_probs[start:]
            tops = tops and tops[start:]
        else:
            self.ids, self.text = [], ""
            self.log_probs = None if log_probs is None else []
            self.top_log_probs = None if tops is None else []
        finish, stop = (self.finish, self.stop) if self.has_ended else (None, None)
        prompt, tensors = self.prompt_log_probs, self._with_tensors
        self.prompt_log_probs, self._with_tensors = None, []
        self.has_new_text = False
        self.end_is_taken = self.has_ended
        return OutputDelta(
            text, ids, log_probs, self.cum_log_prob, tops, self.perf, finish, stop, self.num_tokens, 0,
            prompt, tensors, start, text_start,
        )  # fmt: skip

    def _add_scores(self, result: Result, beam: int, start: int) -> None:
        """Take in the log-probabilities of the tokens from index `start` on."""
        if result.log_probs is not None:
            new = result.log_probs[beam][start:]
            self.log_probs = self.log_probs or []
            self.log_probs += new
            self.cum_log_prob = (self.cum_log_prob or 0.0) + sum(new)
        if result.cum_log_probs is not None:
            self.cum_log_prob = result.cum_log_probs[beam]
        if result.top_log_probs is not None:
            self.top_log_probs = self.top_log_probs or []
            self.top_log_probs += result.top_log_probs[start:]
        if result.prompt_log_probs is not None:
            self.prompt_log_probs = result.prompt_log_probs

    def _shown(self, ids: list[int], result: Result, beam: int) -> list[int]:
        """The last tokens of a sequence without an end id whose text is hidden."""
        by_id = result.finish_reasons[beam] == FinishReason.END_ID
        return ids[:-1] if by_id and ids and ids[-1] in self._hidden_ends else ids

    def _read(self, stream: TextStream, ids: list[int], is_end: bool) -> int | None:
        """Append the text of new tokens. Returns the number of tokens to keep if that has completed a stop string."""
        delta = stream.push(ids)
        text = delta.text
        if is_end and delta.finished_by is None:
            delta = stream.flush()
            text += delta.text
        if text:
            self.text += text
            self.has_new_text = True
        if delta.finished_by is None:
            return None
        self.finish, self.stop = FinishReason.STOP_WORDS, delta.finished_by
        if self._may_withdraw:
            return stream.num_tokens_of(self.text[len(self._prefix) :])
        return delta.num_tokens_kept

    def _finish(self, reason: FinishReason) -> None:
        self.finish = reason
        if reason is FinishReason.END_ID and self.ids:
            self.stop = self.ids[-1]

    def _cut(self, num_tokens: int) -> None:
        """Drop the tokens behind the first `num_tokens`."""
        kept = len(self.ids) - max(0, self.num_tokens - num_tokens)
        del self.ids[kept:]
        if self.log_probs is not None:
            if self.cum_log_prob is not None:
                self.cum_log_prob -= sum(self.log_probs[kept:])
            del self.log_probs[kept:]
        if self.top_log_probs is not None:
            del self.top_log_probs[kept:]
        self.num_tokens = min(self.num_tokens, num_tokens)


def _has_tensors(result: Result) -> bool:
    return (
        result.generation_logits is not None
        or result.context_logits is not None
        or result.additional_outputs is not None
        or result.additional_context_outputs is not None
        or result.kv_state is not None
    )
