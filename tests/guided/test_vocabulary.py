"""Materials of guided decoding: written, read, and made do with."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.api.errors import ConfigError
from backend.api.guide import Guide, GuideType
from backend.guided.llguidance_backend import LLGuidanceBackend
from backend.guided.vocabulary import TokenizerInfo, Vocabulary
from tests.guided.tools import VOCAB, allowed, backend, info, tokenizer

GUIDES = [Guide(GuideType.JSON), Guide(GuideType.REGEX, "[ a-z\u00e4]*")]


def masks(with_vocabulary: Vocabulary) -> list[set[int]]:
    made = LLGuidanceBackend(with_vocabulary)
    return [allowed(made.compile(guide).matcher()) for guide in GUIDES]


@pytest.mark.feature("000-43")
def test_materials_that_were_saved_and_read_make_the_same_masks(tmp_path: Path) -> None:
    info().write(tmp_path / "info.json")
    read = TokenizerInfo.read(tmp_path / "info.json")
    assert read == info() and read.encoded_vocab[5] == tokenizer().visible_token(5, skip_special_tokens=False)
    expected = [allowed(backend().compile(guide).matcher()) for guide in GUIDES]
    assert masks(Vocabulary.of(read, VOCAB)) == expected and all(expected)


@pytest.mark.feature("000-43")
def test_a_vocabulary_alone_allows_the_same_tokens() -> None:
    """The entries say that they are byte-level (GPT-2 writes a space as U+0120), and which look like special tokens."""
    alone = Vocabulary.of(TokenizerInfo(info().encoded_vocab, None, info().stop_token_ids), VOCAB)
    assert alone.tokens == Vocabulary.of(info(), VOCAB).tokens
    assert masks(alone) == [allowed(backend().compile(guide).matcher()) for guide in GUIDES]


def test_entries_are_read_as_they_are_written() -> None:
    """GPT-2's bytes, SentencePiece's spaces and bytes, or plain text; special tokens keep their names."""
    assert Vocabulary.of(TokenizerInfo(["\u0120a", "\u010a", "</s>"], None, [2]), 3).tokens == [b" a", b"\n", b"</s>"]
    fallback = Vocabulary.of(TokenizerInfo(["\u2581a", "<0x0A>", "b", "</s>"], None, [3]), 4)
    assert fallback.tokens == [b" a", b"\n", b"b", b"</s>"] and fallback.special_ids == {3}
    plain = Vocabulary.of(TokenizerInfo([" a", "b", "\u00e4"], None, [1]), 5)
    assert plain.tokens == [b" a", b"b", "\u00e4".encode()] and plain.special_ids == {1} and plain.size == 5


@pytest.mark.parametrize(
    ("made", "size", "sentence"),
    [
        (TokenizerInfo(["a"] * 5), 4, "5 entries, the model 4 tokens"),
        (TokenizerInfo([]), 4, "0 entries"),
        (TokenizerInfo(["a"], None, [9]), 4, r"end ids \[9\]"),
        (TokenizerInfo(["a"], "{", [0]), 4, "no tokenizer.json"),
    ],
)
def test_materials_that_do_not_fit_are_refused(made: TokenizerInfo, size: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Vocabulary.of(made, size)


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"encoded_vocab": 3}')
    for path in (tmp_path / "a.json", tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="guided.tokenizer_info"):
            TokenizerInfo.read(path)
