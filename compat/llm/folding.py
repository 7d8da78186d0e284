"""RequestFold: takes in the engine's Results of one request, and says what has changed of its sequences.

    sampled   each Result has the new tokens of the sequence `sequence_index`
    beams     each Result has all tokens so far of all beams, a list each, which may differ from those of the Result before

A stop string ends its sequence here. The engine is asked to stop only when all sequences have ended, because it can end
nothing less than a request.
"""

from __future__ import annotations

from backend.api import FinishReason, Result
from backend.api.response import TopLogProb
from backend.text.accumulator import OutputAccumulator, OutputDelta
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from compat.llm.updates import NewTensors, SequenceUpdate, TextParams, TokenLogProbs


class SequenceFold:
    """One sequence of a request."""

    def __init__(self, index: int, params: TextParams, tokenizer: Tokenizer | None) -> None:
        self._index = index
        self._params = params
        tokenizer = tokenizer if params.detokenize else None
        self._shown_ids, shown_text = _shown_prompt(params, tokenizer)
        self._output = OutputAccumulator(_new_stream(params, tokenizer), prefix=shown_text, may_withdraw=True)
        self._first: TokenLogProbs | None = None  # that of the first output token, which follows the prompt
        self._prompt_is_told = params.prompt_log_probs is None
        self._is_fresh = False
        self._kv_state: bytes | None = None

    @property
    def has_ended(self) -> bool:
        return self._output.finish is not None

    @property
    def is_due(self) -> bool:
        """True if enough tokens have come since the last update, or the sequence has ended."""
        if not self._is_fresh:
            return False
        new = self._output.num_tokens - self._output.num_taken
        new += 0 if self._output.num_taken else len(self._shown_ids)
        return self.has_ended or abs(new) >= self._params.stream_interval

    def append(self, result: Result) -> None:
        """Append the new tokens of a sampled sequence. Results that arrive after its end are dropped."""
        output = self._output
        self._kv_state = result.kv_state
        if output.finish is None:
            self._note_first(result)
            before = output.num_tokens
            output.append(result)
            if output.finish is not None:
                self._name_stop()
                self._is_fresh = True
            elif output.num_tokens > before:
                self._is_fresh = True
        else:
            output.append(result)

    def replace(self, result: Result, beam: int) -> None:
        """Take in all tokens of a beam. They may have nothing in common with those before."""
        self._output.replace(result, beam)
        self._name_stop()
        self._is_fresh = True

    def end(self, finish: FinishReason) -> None:
        """The request is over, and with it this sequence."""
        if self.has_ended:
            return
        self._output.end(finish)
        self._name_stop()
        self._is_fresh = True

    def take(self, of_prompt: list[TokenLogProbs] | None = None) -> SequenceUpdate:
        """The changes since the last call. `of_prompt`: log-probabilities of the prompt, once they are known."""
        output, delta = self._output, self._output.take()
        self._is_fresh = False
        before = self._shown_ids
        return SequenceUpdate(
            index=self._index,
            ids_kept=len(before) + delta.tokens_kept if delta.tokens_kept else 0,
            ids=delta.ids if delta.tokens_kept else before + delta.ids,
            text_kept=delta.text_kept,
            text=delta.text,
            log_probs=self._log_probs(delta),
            log_probs_kept=0 if self._params.log_probs is None or delta.log_probs is None else delta.tokens_kept,
            prompt_log_probs=self._of_prompt(of_prompt),
            tensors=[
                _new_tensors(result, self._index if self._params.beams else 0) for result, _ in delta.with_tensors
            ],
            num_generated=delta.num_tokens,
            cumulative_log_prob=delta.cum_log_prob,
            finish=output.finish or FinishReason.NOT_FINISHED,
            stop_reason=None if output.finish is FinishReason.END_ID else output.stop,
            perf=delta.perf,
            kv_state=self._kv_state,
        )

    def _log_probs(self, delta: OutputDelta) -> list[TokenLogProbs]:
        if self._params.log_probs is None or delta.log_probs is None:
            return []
        if delta.top_log_probs is None:
            return [TokenLogProbs(token_id, log_prob, []) for token_id, log_prob in zip(delta.ids, delta.log_probs)]
        entries = zip(delta.ids, delta.log_probs, delta.top_log_probs)
        return [_entry(token_id, log_prob, top, self._params.log_probs) for token_id, log_prob, top in entries]

    def _note_first(self, result: Result) -> None:
        """The first output token is the one behind the last token of the prompt."""
        num_top = self._params.prompt_log_probs
        if num_top is None or self._output.num_tokens or not result.log_probs or not any(result.output_token_ids):
            return
        ids = result.output_token_ids[0]
        self._first = _entry(ids[0], result.log_probs[0][0], (result.top_log_probs or [[]])[0], num_top)

    def _of_prompt(self, known: list[TokenLogProbs] | None) -> list[TokenLogProbs]:
        if known is None or self._prompt_is_told:
            return []
        self._prompt_is_told = True
        return known if self._first is None else [*known, self._first]

    def _name_stop(self) -> None:
        """If the engine ended the output at one of the token lists: name the shortest one found, which is also removed."""
        output = self._output
        if output.finish is not FinishReason.STOP_WORDS or output.stop is not None:
            return
        found = [entry for entry in self._params.stop_words if output.ids[-len(entry[1]) :] == entry[1]]
        if not found:
            return
        output.stop, word = min(found, key=lambda entry: len(entry[1]))
        if not self._params.include_stop:
            output.withdraw(len(word))


def _new_stream(params: TextParams, tokenizer: Tokenizer | None) -> TextStream | None:
    if tokenizer is None:
        return None
    return TextStream(tokenizer, params.prompt_ids, params.stops, params.include_stop, params.skip_special_tokens)


def _shown_prompt(params: TextParams, tokenizer: Tokenizer | None) -> tuple[list[int], str]:
    """The tokens and the text that stand in front of the output."""
    ids = params.prompt_ids if params.shows_prompt else []
    if not ids or tokenizer is None:
        return ids, ""
    return ids, tokenizer.decode(ids, params.skip_special_tokens)


def _entry(token_id: int, log_prob: float, top: list[TopLogProb], num_top: int) -> TokenLogProbs:
    return TokenLogProbs(token_id, log_prob, [(one.token_id, one.log_prob) for one in top[:num_top]])


def _new_tensors(result: Result, beam: int) -> NewTensors:
    """`beam`: of which beam of the Result; 0 without beams."""
    return NewTensors(
        result.context_logits,
        None if result.generation_logits is None else result.generation_logits.of(beam),
        result.additional_context_outputs or {},
        {name: rows.of(beam) for name, rows in (result.additional_outputs or {}).items()},
    )


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
