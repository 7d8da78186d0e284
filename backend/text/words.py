"""Turns bad words and stop words that are given as text into lists of token ids.

A word has different token ids at the start of a text, after a space and in the middle of a word. TensorRT-LLM's preprocessing
encodes the word as it was written, and vLLM bans `word` and ` word`. Here a word stands for all of

    encode("word")    encode(" word")    and what each of the two becomes in the middle of a text

without special tokens. Duplicates, and spellings with the unknown token, are left out. The last two are encoded behind a line
break, whose own tokens are then cut off, because a tokenizer like SentencePiece would put a space before everything else. A
text in which the word merges with its neighbours into other tokens is not found. Therefore stop strings are matched with text
(stop_strings.py), and token lists serve requests that ask for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.api.errors import InvalidRequest
from backend.text.tokenizer import Tokenizer

_ANCHOR = "\n"


def word_token_ids(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """The spellings of one word as token ids, beginning with that of the bare word. Raises InvalidRequest if it has none."""
    if not word:
        raise InvalidRequest("a stop word or bad word is empty, at least one character is needed; leave it out")
    bare = word.lstrip(" ") or word
    forms = [
        tokenizer.encode(word, add_special_tokens=False),
        tokenizer.encode(" " + bare, add_special_tokens=False),
        _inside_text(tokenizer, bare),
        _inside_text(tokenizer, " " + bare),
    ]
    unknown = tokenizer.token_to_id(tokenizer.special_tokens.get("unk_token", ""))
    usable = [ids for ids in forms if ids and unknown not in ids]
    if not usable:
        raise InvalidRequest(f"the word {word[:40]!r} cannot be written with this model's tokens; leave it out")
    return [list(ids) for ids in dict.fromkeys(map(tuple, usable))]


def words_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The spellings of all words in one list, as Request.bad_words and Request.stop_words have them."""
    spellings = [tuple(ids) for word in words for ids in word_token_ids(tokenizer, word)]
    return [list(ids) for ids in dict.fromkeys(spellings)]


def _inside_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of `text` behind a line break; [] when the break and the text merge into one token."""
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    ids = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
    return ids[len(anchor) :] if ids[: len(anchor)] == anchor else []
