"""Bad words and stop words given as text, as token lists.

A word has several spellings in tokens: at the start of a text, after a space, in the middle of a word. TensorRT-LLM's
preprocessing encodes the word as it was written; vLLM bans `word` and ` word`. Here a word stands for all of

    encode("word")    encode(" word")    and both as they come out in the middle of a text

without special tokens, doubles and spellings with the unknown token left out. The last two are encoded behind a line
break whose own tokens are cut off: a SentencePiece-like tokenizer would else put a space in front of everything. A
longer text that merges the word with its neighbours into other tokens is not covered; stop strings are therefore
matched on text (stop_strings.py), and token lists are for requests that want them.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.api.errors import InvalidRequest
from backend.text.tokenizer import Tokenizer

_ANCHOR = "\n"


def word_token_ids(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """The token spellings of one word, the plainest first. Raises InvalidRequest for a word that has none."""
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
    """The spellings of all words in one list: the form of Request.bad_words and Request.stop_words."""
    spellings = [tuple(ids) for word in words for ids in word_token_ids(tokenizer, word)]
    return [list(ids) for ids in dict.fromkeys(spellings)]


def _inside_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of `text` behind a line break; [] when the break merges with it."""
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    ids = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
    return ids[len(anchor) :] if ids[: len(anchor)] == anchor else []
