"""RequestFold: takes in the engine's Results of one request, and says what has changed of its sequences.

    sampled   each Result has the new tokens of the sequence `sequence_index`
    beams     each Result has all tokens so far of all beams, a list each, which may differ from those of the Result before

A stop string ends its sequence here. The engine is asked to stop only when all sequences have ended, because it can end
nothing less than a request.
"""

from __future__ import annotations

from os.path import commonprefix

from backend.api import FinishReason, PerfMetrics, Result
from backend.text.detokenizer import IncrementalDetokenizer
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from compat.llm.updates import NewTensors, SequenceUpdate, TextParams, TokenLogProbs


class SequenceFold:
    """One sequence of a request."""

    def __init__(self, index: int, params: TextParams, tokenizer: Tokenizer | None) -> None:
        self._index = index
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._shown_ids, self._shown_text = self._shown_prompt()
        self._generated: list[int] = []  # as the engine made them
        self._stream = self._new_stream()
        self.ids = list(self._shown_ids)  # in the form of updates
        self.text = self._shown_text
        self._log_probs: list[TokenLogProbs] = []
        self._ids_told = self._text_told = self._log_probs_told = 0
        self._cumulative: float | None = None
        self._perf: PerfMetrics | None = None
        self._first: TokenLogProbs | None = None  # that of the first output token, which follows the prompt
        self._prompt_is_told = params.prompt_log_probs is None
        self._tensors: list[NewTensors] = []
        self.finish = FinishReason.NOT_FINISHED
        self._stop_reason: str | int | None = None
        self._is_fresh = False

    @property
    def has_ended(self) -> bool:
        return self.finish is not FinishReason.NOT_FINISHED

    @property
    def is_due(self) -> bool:
        """True if enough tokens have come since the last update, or the sequence has ended."""
        if not self._is_fresh:
            return False
        return self.has_ended or abs(len(self.ids) - self._ids_told) >= self._params.stream_interval

    def append(self, result: Result) -> None:
        """Take in the new tokens of a sampled sequence. What comes after its end is dropped."""
        ids = result.output_token_ids[0] if result.output_token_ids else []
        self._perf = result.perf_metrics or self._perf
        if self.has_ended:
            return
        self._note_first(result, ids)
        self._generated += ids
        self.ids += ids
        self._note_log_probs(result, 0, ids)
        self._note_tensors(result)
        if self._params.log_probs is not None or result.cum_log_probs is not None:
            self._cumulative = result.cum_log_probs[0] if result.cum_log_probs else self._cumulative
        self._read(ids)
        if not self.has_ended and (result.is_final or result.is_sequence_final):
            self._end(FinishReason(result.finish_reasons[0]))

    def replace(self, result: Result, beam: int) -> None:
        """Take in all tokens of a beam. They may have nothing in common with those before."""
        ids = result.output_token_ids[beam]
        same = len(commonprefix([ids, self._generated]))
        if same < len(self._generated) or self.has_ended:
            self._start_again()
            same = 0
        self._perf = result.perf_metrics or self._perf
        self._generated += ids[same:]
        self.ids += ids[same:]
        self._log_probs = []
        self._note_log_probs(result, beam, ids)
        self._cumulative = None if result.cum_log_probs is None else result.cum_log_probs[beam]
        self._read(ids[same:])
        if result.is_final and not self.has_ended:
            self._end(FinishReason(result.finish_reasons[beam]))
        self._is_fresh = True

    def end(self, finish: FinishReason) -> None:
        """The request is over, and with it this sequence."""
        if not self.has_ended:
            self._end(finish)

    def take(self, of_prompt: list[TokenLogProbs] | None = None) -> SequenceUpdate:
        """The changes since the last call. `of_prompt`: log-probabilities of the prompt, once they are known."""
        kept, text_kept = min(self._ids_told, len(self.ids)), min(self._text_told, len(self.text))
        first = min(self._log_probs_told, len(self._log_probs))
        update = SequenceUpdate(
            index=self._index,
            ids_kept=kept,
            ids=self.ids[kept:],
            text_kept=text_kept,
            text=self.text[text_kept:],
            log_probs=self._log_probs[first:],
            log_probs_kept=first,
            prompt_log_probs=self._of_prompt(of_prompt),
            tensors=self._tensors,
            num_generated=len(self._generated),
            cumulative_log_prob=self._cumulative,
            finish=self.finish,
            stop_reason=self._stop_reason,
            perf=self._perf,
        )
        self._ids_told, self._text_told, self._log_probs_told = len(self.ids), len(self.text), len(self._log_probs)
        self._is_fresh, self._tensors = False, []
        return update

    def _new_stream(self) -> TextStream | None:
        if self._tokenizer is None:
            return None
        params = self._params
        return TextStream(
            self._tokenizer, params.prompt_ids, params.stops, params.include_stop, params.skip_special_tokens
        )

    def _shown_prompt(self) -> tuple[list[int], str]:
        """The tokens and the text that stand in front of the output."""
        ids = self._params.prompt_ids if self._params.shows_prompt else []
        if not ids or self._tokenizer is None:
            return ids, ""
        return ids, self._tokenizer.decode(ids, self._params.skip_special_tokens)

    def _start_again(self) -> None:
        """Forget what the beam was: another one has taken its place."""
        self._generated, self.ids, self.text = [], list(self._shown_ids), self._shown_text
        self._stream = self._new_stream()
        self.finish, self._stop_reason = FinishReason.NOT_FINISHED, None
        self._ids_told = self._text_told = self._log_probs_told = 0

    def _note_log_probs(self, result: Result, beam: int, ids: list[int]) -> None:
        if self._params.log_probs is None or result.log_probs is None:
            return
        tops = result.top_log_probs if result.top_log_probs is not None and not self._params.beams else []
        for n, (token_id, log_prob) in enumerate(zip(ids, result.log_probs[beam])):
            top = [(entry.token_id, entry.log_prob) for entry in tops[n]] if n < len(tops) else []
            self._log_probs.append(TokenLogProbs(token_id, log_prob, top[: self._params.log_probs]))

    def _note_first(self, result: Result, ids: list[int]) -> None:
        """The first output token is the one behind the last token of the prompt."""
        if self._params.prompt_log_probs is None or self._generated or not ids or not result.log_probs:
            return
        top = [(entry.token_id, entry.log_prob) for entry in (result.top_log_probs or [[]])[0]]
        self._first = TokenLogProbs(ids[0], result.log_probs[0][0], top[: self._params.prompt_log_probs])

    def _note_tensors(self, result: Result) -> None:
        new = NewTensors(
            result.context_logits,
            result.generation_logits,
            result.additional_context_outputs or {},
            result.additional_outputs or {},
        )
        if new != NewTensors():
            self._tensors.append(new)

    def _of_prompt(self, known: list[TokenLogProbs] | None) -> list[TokenLogProbs]:
        if known is None or self._prompt_is_told:
            return []
        self._prompt_is_told = True
        return known if self._first is None else [*known, self._first]

    def _read(self, ids: list[int]) -> None:
        self._is_fresh = self._is_fresh or bool(ids)
        if self._stream is not None:
            delta = self._stream.push(ids)
            self.text += delta.text
            if delta.finished_by is not None:
                self._end_by(delta.finished_by, delta.num_tokens_kept)

    def _end(self, finish: FinishReason) -> None:
        """Note the engine's reason, unless the rest of the text completes a stop string."""
        self._is_fresh = True
        if self._stream is not None:
            delta = self._stream.flush()
            self.text += delta.text
            if delta.finished_by is not None:
                self._end_by(delta.finished_by, delta.num_tokens_kept)
                return
        self.finish = finish
        if finish is FinishReason.STOP_WORDS:
            self._end_by_word()

    def _end_by(self, stop: str, num_kept: int) -> None:
        """A stop string has been found: only the tokens that the shown text needs stay."""
        self._is_fresh = True
        self.finish, self._stop_reason = FinishReason.STOP_WORDS, stop
        del self._generated[num_kept:]
        if not self._params.include_stop:
            del self._generated[self._num_shown() :]
        self._cut()

    def _end_by_word(self) -> None:
        """The engine has found token lists at the end. The shortest of them is what is taken off."""
        found = [entry for entry in self._params.stop_words if self._generated[-len(entry[1]) :] == entry[1]]
        if not found:
            return
        self._stop_reason, word = min(found, key=lambda entry: len(entry[1]))
        if not self._params.include_stop:
            del self._generated[-len(word) :]
            self._cut()
            self._show_again()

    def _cut(self) -> None:
        self.ids = self._shown_ids + self._generated
        num_generated = len(self._generated)
        if self._cumulative is not None and num_generated < len(self._log_probs):
            self._cumulative -= sum(entry.log_prob for entry in self._log_probs[num_generated:])
        del self._log_probs[num_generated:]

    def _show_again(self) -> None:
        """Make the text anew, because tokens were taken off its end."""
        stream = self._new_stream()
        if stream is not None:
            self.text = self._shown_text + stream.push(self._generated).text + stream.flush().text

    def _num_shown(self) -> int:
        """The least number of generated tokens whose text begins with the text that is shown."""
        assert self._tokenizer is not None, "a stop string is found in text only"
        shown = self.text[len(self._shown_text) :]
        replay = IncrementalDetokenizer(self._tokenizer, self._params.prompt_ids, self._params.skip_special_tokens)
        stable = ""
        for n, token_id in enumerate(self._generated):
            if (stable + replay.peek()).startswith(shown):
                return n
            stable += replay.push((token_id,))
        return len(self._generated)


class RequestFold:
    """All sequences of one request."""

    def __init__(self, params: TextParams, tokenizer: Tokenizer | None) -> None:
        self._params = params
        self._sequences = [SequenceFold(index, params, tokenizer) for index in range(params.num_sequences)]
        self._engine_is_done = False
        self._of_prompt: list[TokenLogProbs] | None = None

    @property
    def is_final(self) -> bool:
        """Beams end with the engine only: one that has ended may still be replaced by a better one."""
        if self._params.beams:
            return self._engine_is_done
        return self._engine_is_done or all(sequence.has_ended for sequence in self._sequences)

    @property
    def wants_cancel(self) -> bool:
        """True if the engine still works on a request whose text has ended."""
        return self.is_final and not self._engine_is_done

    def feed(self, result: Result) -> None:
        if self._of_prompt is None and self._params.prompt_log_probs is not None and result.sequence_index == 0:
            self._of_prompt = [
                TokenLogProbs(token_id, entry.log_prob, [(top.token_id, top.log_prob) for top in entry.top], entry.rank)
                for token_id, entry in zip(self._params.prompt_ids[1:], result.prompt_log_probs or [])
            ]
        if self._params.beams:
            for beam in range(min(len(result.output_token_ids), len(self._sequences))):
                self._sequences[beam].replace(result, beam)
        elif 0 <= result.sequence_index < len(self._sequences):
            self._sequences[result.sequence_index].append(result)
        if result.is_final:
            self._engine_is_done = True
            for sequence in self._sequences:
                sequence.end(FinishReason(result.finish_reasons[0]))

    def take(self) -> list[SequenceUpdate]:
        """The updates to send now; without streaming none before the end."""
        if self.is_final:
            return [sequence.take(self._of_prompt) for sequence in self._sequences]
        if not self._params.streaming:
            return []
        return [sequence.take(self._of_prompt) for sequence in self._sequences if sequence.is_due]
