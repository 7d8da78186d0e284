"""The ids of texts are those of the published tokenizer, whose words are cut by the rules below."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from backend.text.tokenizer import Tokenizer as Own
from deploy import ROOT
from tests.real.conftest import RealModel

pytestmark = pytest.mark.real
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The pre_tokenizer and normalizer of each published tokenizer.json.
PUBLISHED: dict[str, tuple[Any, Any]] = {
    "smollm2": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        None,
    ),
    "qwen": (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        normalizers.NFC(),
    ),
}
ALPHABETS = (
    *("abcXYZ 0123456789\n\t.,;'\"_-", "äöüßéñçø ", "абвгд ", "漢字かなカナ ", "عربى ", "क्षिज्ञ "),
    *("🦩🫠👩\u200d👧 ", "\u00a0\u200b\u0301e\u0308"),
)


def texts() -> list[str]:
    """Paragraphs of prose and of code, and random strings of several alphabets."""
    prose = (ROOT / "README.md").read_text() + (ROOT / "docs" / "replay.md").read_text()
    code = (ROOT / "backend" / "api" / "request.py").read_text()
    found = [part for part in prose.split("\n\n") if part][:60] + code.split("\n\n")[:40]
    rng = random.Random(1)
    while len(found) < 200:
        several = rng.sample(ALPHABETS, 3)
        found.append("".join(rng.choice(rng.choice(several)) for _ in range(rng.randrange(1, 80))))
    return found


def published(name: str, file: Path) -> Tokenizer:
    """The vocabulary and merges as llama.cpp's own package reads them, with the published rules."""
    fields = gguf.GGUFReader(file).fields
    tokens, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ", 1)) for merge in merges]))
    tokenizer.pre_tokenizer, normalizer = PUBLISHED[name]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def test_two_hundred_texts_have_the_ids_of_the_published_tokenizer(model: RealModel) -> None:
    if model.name not in PUBLISHED:
        pytest.skip(f"{model.name} is no file with byte-level words")
    own, expected = Own.from_directory(model.path), published(model.name, model.file)
    assert len(texts()) == 200
    for text in texts():
        assert own.encode(text, add_special_tokens=False) == expected.encode(text, add_special_tokens=False).ids
