"""IncrementalDetokenizer: token ids in, text that will not change out.

With full(n) = decode(prompt_ids + ids[:n]) and start = decode(prompt_ids), the concatenation of all chunks, `flush`
included, is exactly full(N) without the longest common prefix of start and full(N). That is full(N)[len(start):]
whenever start is a prefix of full(N); it is not when the prompt ends inside a character, which the output then
completes.

A chunk is emitted as soon as no continuation can change it, so chunks end at character borders, hold U+FFFD only
where the full decode does, and depend on the ids alone, not on how they were split into pushes. Cost per token is
constant. Everything here is rebuilt from token ids: construct with the prompt and push the output so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix

from backend.text.decoding import REPLACEMENT, DecodePipeline, byte_level_bytes, fallback_byte
from backend.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 64  # visible prompt tokens that are enough for any state that `DecodePipeline.forgets`


class IncrementalDetokenizer:
    """The text of one output stream. `prompt_ids`: all tokens before the output (history too)."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pipeline = tokenizer.new_pipeline()
        for token_id in _relevant_tail(prompt_ids, tokenizer, self._pipeline, skip_special_tokens):
            self._feed(token_id)
        self._to_skip = self._pipeline.copy().finish()  # the end of the prompt's text that is not final yet

    @property
    def holds(self) -> bool:
        """Whether tokens have been pushed whose text is not emitted yet, or not in full."""
        return self._pipeline.holds

    def push(self, ids: Sequence[int]) -> str:
        """Take in output tokens; return the text that became final, possibly ""."""
        return self._without_prompt("".join([self._feed(token_id) for token_id in ids]))

    def flush(self) -> str:
        """The output is over: return the rest. Nothing may be pushed afterwards."""
        return self._without_prompt(self._pipeline.finish())

    def peek(self) -> str:
        """What `flush` would return now; changes nothing."""
        rest = self._pipeline.copy().finish()
        return rest[len(commonprefix([rest, self._to_skip])) :]

    def text_with(self, token_id: int) -> str:
        """The text that this token would add as the last one; changes nothing. Half a character is none."""
        now, longer = self._pipeline.copy(), self._pipeline.copy()
        token = self._tokenizer.visible_token(token_id, self._skip_special_tokens)
        before = now.finish()
        after = ("" if token is None else longer.push(token)) + longer.finish()
        return after[len(commonprefix([before, after])) :].rstrip(REPLACEMENT)

    def _feed(self, token_id: int) -> str:
        token = self._tokenizer.visible_token(token_id, self._skip_special_tokens)
        return "" if token is None else self._pipeline.push(token)

    def _without_prompt(self, text: str) -> str:
        """Drop what the prompt's own text holds already; the first difference ends the comparison for good."""
        if not self._to_skip or not text:
            return text
        same = len(commonprefix([text, self._to_skip]))
        self._to_skip = self._to_skip[same:] if same == len(text) else ""
        return text[same:]


def _relevant_tail(
    ids: Sequence[int], tokenizer: Tokenizer, pipeline: DecodePipeline, skip_special_tokens: bool
) -> Sequence[int]:
    """The end of the prompt that fixes the pipeline's state; all of it when the decoder does not forget.

    The tail starts at a token that ends every byte sequence (ASCII at its end, and no <0xXX>), far enough back that
    what only the very first tokens of a text undergo is over.
    """
    if not pipeline.forgets or len(ids) <= _CONTEXT_TOKENS:
        return ids
    visible = 0
    for i in range(len(ids) - 1, -1, -1):
        token = tokenizer.visible_token(ids[i], skip_special_tokens)
        if token:
            visible += 1
            if visible >= _CONTEXT_TOKENS and fallback_byte(token) is None and byte_level_bytes(token)[-1] < 0x80:
                return ids[i:]
    return ids
