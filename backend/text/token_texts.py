"""TokenTexts: the text of each output token by itself, as log-probabilities show it.

A token that ends inside a character has no text until the one that completes it: the texts of all sampled tokens, one after
the other, are the text of the output. A token's own content is in its bytes.
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
        self._bytes: dict[int, bytes | None] = {}  # token id -> bytes, for the tokens that have occurred
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens=False)

    def alternative(self, token_id: int) -> TokenText:
        """The text that `token_id` would add here; changes nothing."""
        return self._token(token_id, self._detokenizer.text_with(token_id))

    def push(self, token_id: int) -> TokenText:
        """The next token of the output."""
        return self._token(token_id, self._detokenizer.push((token_id,)))

    def flush(self) -> str:
        """The output is over: the text of its last tokens that was still held back. Nothing may be pushed afterwards."""
        return self._detokenizer.flush(in_characters=True)

    def _token(self, token_id: int, text: str) -> TokenText:
        return TokenText(text, self.bytes_of(token_id, text))

    def bytes_of(self, token_id: int, text: str) -> bytes:
        """The bytes of a token that adds `text` in its place."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._own_bytes(token_id)
        own = self._bytes[token_id]
        return text.encode("utf-8", "replace") if own is None else own

    def _own_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that stands for the same ones in every place; None for one that is known by its text only."""
        token = self._tokenizer.visible_token(token_id, skip_special_tokens=False) or ""
        byte = fallback_byte(token)
        if byte is not None:
            return bytes([byte])
        if self._tokenizer.is_byte_level and token_id not in self._tokenizer.special_ids:
            return byte_level_bytes(token)
        return None


class PromptTexts:
    """Follows the tokens of a prompt, whose text is `text`.

    The bytes of all tokens, one after the other, are the text. So a special token that the text does not hold, such as one
    that the tokenizer puts in front, has no bytes.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._shown = IncrementalDetokenizer(tokenizer)
        self._num_chars = 0  # length of the text that the tokens so far have added
        self._texts = TokenTexts(tokenizer)

    def alternative(self, token_id: int) -> TokenText:
        """The text that another token would add here; changes nothing."""
        return self._texts.alternative(token_id)

    def push(self, token_id: int) -> TokenText:
        """The next token of the prompt."""
        self._texts.push(token_id)
        if token_id in self._tokenizer.special_ids:
            name = self._tokenizer.visible_token(token_id, skip_special_tokens=False) or ""
            is_held = bool(name) and self._text.startswith(name, self._num_chars)
            self._num_chars += len(name) if is_held else 0
            return TokenText(name, name.encode() if is_held else b"")
        added = self._shown.push((token_id,))
        self._num_chars += len(added)
        return TokenText(added, self._texts.bytes_of(token_id, added))
