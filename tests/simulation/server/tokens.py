"""A tiny byte-level tokenizer, and the text that a list of tokens stands for, worked out at once instead of token by token."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from backend.serving.wires.front import TextTools
from backend.text.tokenizer import Tokenizer
from tests.simulation.setups import VOCAB
from tests.text.random_sequences import text_in_characters

PAD_ID, BEGIN_ID, END_ID = 0, 1, 2
SPECIAL = ("<pad>", "<s>", "</s>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = ("a", "b", "ab", "ba", "é", "ß", "字", "🙂", " ", " a", "\n")


def _spelled(text: str) -> str:
    """The vocabulary's spelling of a text: a letter for each of its bytes."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in splitter.pre_tokenize_str(text))


@cache
def tokenizer() -> Tokenizer:
    """All bytes, and words of two or three PIECES."""
    vocabulary = {text: index for index, text in enumerate([*SPECIAL, *ALPHABET])}
    words = [a + b + c for c in ("", *PIECES) for a in PIECES for b in PIECES]
    for word in words:
        if len(vocabulary) < VOCAB:
            vocabulary.setdefault(_spelled(word), len(vocabulary))
    assert len(vocabulary) == VOCAB, len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]})


class TinyTools:
    """Takes the place of TextTools in serving/assembly.py."""

    @staticmethod
    def from_directory(path: str, chat_template: str = "", make_renderer: object = None) -> TextTools:
        return TextTools(tokenizer(), None)  # type: ignore[arg-type]  # Nobody sends messages.


def text_of(ids: list[int], stop: str = "") -> tuple[str, bool]:
    """The text of output tokens, up to the end of the stop string; and whether that is in it."""
    text = text_in_characters(tokenizer(), [], ids, True)
    at = text.find(stop) if stop else -1
    return (text, False) if at < 0 else (text[: at + len(stop)], True)
