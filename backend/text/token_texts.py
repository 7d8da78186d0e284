"""TokenTexts: the text of each output token by itself, as log-probabilities show it.

A token that ends inside a character has no text until the one that completes it: the texts of all sampled tokens, one after
the other, are the text of the output. What the token itself stands for is told by its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from backend.text.decoding import byte_level_bytes, fallback_byte
from backend.text.detokenizer import IncrementalDetokenizer
from backend.text.tokenizer import Tokenizer


class TokenText(Struct, frozen=True):
    """`text` is what the token adds in its place, special tokens by their name; `raw` its own bytes."""

    text: str
    raw: bytes


class TokenTexts:
    """Follows one output. `prompt_ids`: all tokens before it."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens=False)

    def alternative(self, token_id: int) -> TokenText:
        """The text that `token_id` would add here; changes nothing."""
        return self._token(token_id, self._detokenizer.text_with(token_id))

    def push(self, token_id: int) -> TokenText:
        """The next token of the output."""
        return self._token(token_id, self._detokenizer.push((token_id,)))

    def flush(self) -> str:
        """The output is over: the text of its last tokens that was still held back. Nothing may be pushed afterwards."""
        return self._detokenizer.flush()

    def _token(self, token_id: int, text: str) -> TokenText:
        token = self._tokenizer.visible_token(token_id, skip_special_tokens=False) or ""
        byte = fallback_byte(token)
        if byte is not None:
            return TokenText(text, bytes([byte]))
        if self._tokenizer.is_byte_level and token_id not in self._tokenizer.special_ids:
            return TokenText(text, byte_level_bytes(token))
        return TokenText(text, text.encode("utf-8", "replace"))
