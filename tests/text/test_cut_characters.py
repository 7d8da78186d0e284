"""An output that ends inside a character: its text ends before that, streamed or not."""

from __future__ import annotations

import pytest

from backend.text.stream import TextStream
from backend.text.token_texts import TokenTexts
from backend.text.tokenizer import Tokenizer
from tests.text.tokenizers_made import made


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("family", ["byte_level_bpe", "sentencepiece_bpe", "gpt2_of_torn_characters", "llama3_bpe"])
@pytest.mark.parametrize("at_once", [True, False])
def test_no_cut_answer_ends_in_half_a_character(family: str, at_once: bool) -> None:
    tokenizer = made(family)
    ids, torn = ids_of(tokenizer, "a é🦩"), 0
    for count in range(len(ids) + 1):
        stream = TextStream(tokenizer)
        parts = [ids[:count]] if at_once else [[one] for one in ids[:count]]
        text = "".join(stream.push(part).text for part in parts) + stream.flush().text
        library = tokenizer.decode(ids[:count])
        torn += "\ufffd" in library
        assert "a é🦩".startswith(text.strip()) and (library.startswith(text) or not tokenizer.is_byte_level)
    assert torn, "the library's text of some of them ends in half a character"


def test_bytes_that_are_no_character_stay_visible() -> None:
    tokenizer = made("sentencepiece_bpe")
    bytes_ = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0xFF, 0x80, 0xC3)}
    assert None not in bytes_.values()
    stream = TextStream(tokenizer)
    text = stream.push([one for one in (bytes_[0xFF], bytes_[0x80]) if one is not None]).text + stream.flush().text
    assert text == "\ufffd\ufffd"


def test_the_texts_of_tokens_end_with_it() -> None:
    tokenizer = made("byte_level_bpe")
    texts = TokenTexts(tokenizer)
    first, *_ = ids_of(tokenizer, "🦩")
    assert texts.push(first).text == "" and texts.flush() == ""
