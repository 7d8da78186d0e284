"""IncrementalDetokenizer: takes token ids and returns text that will not change any more.

Let full(n) = decode(prompt_ids + ids[:n]) and start = decode(prompt_ids). All chunks together, with that of `flush`, are
exactly full(N) without the longest common prefix of start and full(N). That is full(N)[len(start):] if start is a prefix of
full(N). It is not one if the prompt ends inside a character, which the output then completes.

A chunk is emitted as soon as nothing that follows can change it. So chunks end between characters, and contain U+FFFD only
where the full text does. All chunks together depend on the ids alone, not on how the ids were split into pushes. The cost of
a token is constant. The state can be rebuilt from token ids: construct with the prompt, and push the output so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix

from backend.text.decoding import REPLACEMENT, DecodePipeline, byte_level_bytes, fallback_byte
from backend.text.tokenizer import Tokenizer

# The last visible tokens of the prompt, as many as determine the state of any decoder with a bounded memory.
_CONTEXT_TOKENS = 64


class IncrementalDetokenizer:
    """Detokenises one output stream. `prompt_ids` are all tokens before the output, with those of earlier turns."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids`: special tokens whose text is shown in any case."""
        self._tokenizer = tokenizer
        self._skip_special_tokens, self._shown_ids = skip_special_tokens, shown_ids
        self._pipeline = tokenizer.new_pipeline()
        self._rest: str | None = None  # cached result of the pipeline's `finish`; None if unknown
        for token_id in _relevant_tail(prompt_ids, tokenizer, self._pipeline, skip_special_tokens):
            self._feed(token_id)
        self._to_skip = self._pipeline.copy().finish()  # the end of the prompt's text, which is not final yet

    @property
    def holds(self) -> bool:
        """True if some text of the pushed tokens is not final yet."""
        return self._pipeline.holds

    def push(self, ids: Sequence[int]) -> str:
        """Take in output tokens, and return the text that has become final, which may be empty."""
        return self._without_prompt("".join([self._feed(token_id) for token_id in ids]))

    def flush(self, in_characters: bool = False) -> str:
        """The output is over: return the rest. Nothing may be pushed afterwards. With `in_characters` the bytes of a character
        that the output only begins are no text; else the full text has U+FFFD for them.
        """
        if in_characters:
            self._pipeline.drop_incomplete()
        return self._without_prompt(self._pipeline.finish())

    def peek(self) -> str:
        """The text that `flush` would return now. The state does not change."""
        rest = self._pipeline.copy().finish()
        return rest[len(commonprefix([rest, self._to_skip])) :]

    def text_with(self, token_id: int) -> str:
        """The text that this token would add as the last one. An incomplete UTF-8 sequence yields no text. Changes nothing."""
        longer = self._pipeline.copy()
        token = self._visible(token_id)
        if self._rest is None:
            self._rest = self._pipeline.copy().finish()
        before = self._rest
        after = ("" if token is None else longer.push(token)) + longer.finish()
        return after[len(commonprefix([before, after])) :].rstrip(REPLACEMENT)

    def _feed(self, token_id: int) -> str:
        token = self._visible(token_id)
        self._rest = None
        return "" if token is None else self._pipeline.push(token)

    def _visible(self, token_id: int) -> str | None:
        skip = self._skip_special_tokens and token_id not in self._shown_ids
        return self._tokenizer.visible_token(token_id, skip)

    def _without_prompt(self, text: str) -> str:
        """Drop what is part of the prompt's text. The comparison ends for good at the first difference."""
        if not self._to_skip or not text:
            return text
        same = len(commonprefix([text, self._to_skip]))
        self._to_skip = self._to_skip[same:] if same == len(text) else ""
        return text[same:]


def _relevant_tail(
    ids: Sequence[int], tokenizer: Tokenizer, pipeline: DecodePipeline, skip_special_tokens: bool
) -> Sequence[int]:
    """The end of the prompt that fixes the pipeline's state, or the whole prompt if the pipeline does not forget.

    It starts at a token that ends every byte sequence, which is one that ends with ASCII and is no <0xXX>. It is so long that
    the special treatment of a text's first tokens is over before it ends.
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
