"""Edges of the text modules, with tokenizers so small that every token is known. Imports nothing that is slow."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from backend.api.errors import InvalidRequest
from backend.text.chat import ChatTemplate
from backend.text.detokenizer import IncrementalDetokenizer
from backend.text.tokenizer import Tokenizer
from backend.text.words import word_token_ids, words_token_ids

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture
def characters() -> Tokenizer:
    """One token for each character: a space, a line break, f and o."""
    backend = Backend(models.BPE({" ": 0, "\n": 1, "f": 2, "o": 3}, []))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


@pytest.fixture
def fallback_bytes() -> Tokenizer:
    """Ids 0 to 255 are the bytes, 256 is the letter a."""
    vocabulary = {token: n for n, token in enumerate([*BYTES, "a"])}
    backend = Backend(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend)


def test_a_rendered_chat_may_be_as_long_as_the_cap() -> None:
    messages = [{"role": "user", "content": ""}]
    assert ChatTemplate("{{ 'x' * 100 }}", max_chars=100).render(messages) == "x" * 100
    with pytest.raises(InvalidRequest, match="the rendered chat is longer than 100 characters"):
        ChatTemplate("{{ 'x' * 101 }}", max_chars=100).render(messages)


def test_a_long_prompt_is_not_cut_within_a_run_of_bytes(fallback_bytes: Tokenizer) -> None:
    """The last byte makes text of all bytes before it, however many these are."""
    *run, last = "人".encode() * 30
    prompt = [256] * 10 + run
    stream = IncrementalDetokenizer(fallback_bytes, prompt)
    assert stream.push([last]) + stream.flush() == "人" * 30
    assert fallback_bytes.decode([*prompt, last]) == "a" * 10 + "人" * 30


def test_a_token_is_a_byte_exactly_where_the_library_says_so() -> None:
    digits = ["41", "fF", "+A", "-1", "-0", " A", "A ", "G0", "é", "٣٣", "4", "041", "1_"]
    vocabulary = {token: n for n, token in enumerate(["a", *(f"<0x{each}>" for each in digits), "<0X41>", "0x4100"])}
    backend = Backend(models.WordLevel(vocabulary, unk_token="a"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    for token_id in vocabulary.values():
        stream = IncrementalDetokenizer(tokenizer)
        assert stream.push([0, token_id, 0]) + stream.flush() == tokenizer.decode([0, token_id, 0])


def test_a_word_with_a_space_in_front_stands_for_the_spellings_of_the_word(characters: Tokenizer) -> None:
    assert word_token_ids(characters, " foo") == [[0, 2, 3, 3], [2, 3, 3]]
    assert word_token_ids(characters, "foo") == [[2, 3, 3], [0, 2, 3, 3]]


def test_a_spelling_that_two_words_share_counts_once(characters: Tokenizer) -> None:
    assert words_token_ids(characters, ["foo", " foo", "o"]) == [[2, 3, 3], [0, 2, 3, 3], [3], [0, 3]]
