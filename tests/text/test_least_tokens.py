"""The bound on tokens that is found without tokenising: it is never above the truth, and high where texts are hostile."""

from __future__ import annotations

import random
import string

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from backend.text.tokenizer import Tokenizer
from tests.text.tokenizers_made import FAMILIES, MORE_FAMILIES, made


def texts_of(tokenizer: Tokenizer, number: int) -> list[str]:
    """Texts that few tokens write: entries of the vocabulary, the longest above all, and what normalizers compose or drop."""
    generator = random.Random(number)
    entries = sorted(tokenizer._backend.get_vocab(with_added_tokens=True), key=len)
    pieces = [
        *entries[-20:],
        *generator.sample(entries, min(80, len(entries))),
        "e\u0301",
        "<\u0338",
        "  ",
        "\u200b",
        "é",
    ]
    return ["".join(generator.choices(pieces, k=generator.randint(1, 60))) for _ in range(100)]


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_no_text_has_fewer_tokens(family: str) -> None:
    tokenizer = made(family)
    for text in texts_of(tokenizer, 1):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), text


@pytest.mark.parametrize("text", [string.digits * 99, "?!" * 99, "zq" * 99, "a1?" * 99])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Replace(" ", "▁")])
def test_of_single_characters_the_number_is_exact(text: str, normalizer: normalizers.Normalizer | None) -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE({char: number for number, char in enumerate(sorted(alphabet))}, []))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(backend)
    assert tokenizer.least_tokens(text) == len(text) == len(tokenizer.encode(text))


@pytest.mark.parametrize("vocab", [{"[UNK]": 0, "a": 1}, {"[UNK]": 0, "1": 1}])
def test_a_run_of_unknown_characters_may_be_one_token(vocab: dict[str, int]) -> None:
    tokenizer = Tokenizer(Backend(models.BPE(vocab, [], unk_token="[UNK]", fuse_unk=True)))
    unknown = "1" if "a" in vocab else "a"
    assert tokenizer.least_tokens(unknown * 100) == 0 < len(tokenizer.encode(unknown * 100))
    assert tokenizer.least_tokens(("a" if "a" in vocab else "1") * 100) == 100


@pytest.mark.parametrize("normalizer", [normalizers.Lowercase(), normalizers.Replace("1", ""), normalizers.Strip()])
def test_a_step_that_may_drop_characters_makes_the_bound_zero(normalizer: normalizers.Normalizer) -> None:
    backend = Backend(models.BPE({char: number for number, char in enumerate(string.printable)}, []))
    backend.normalizer = normalizer
    assert Tokenizer(backend).least_tokens("1" * 100) == 0


def test_text_that_a_normalizer_may_compose_is_not_counted() -> None:
    vocab = {text: number for number, text in enumerate([*string.printable, "≮", "≮≮"])}
    backend = Backend(models.BPE(vocab, [("≮", "≮")]))
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend)
    text = "<\u0338" * 100
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text)) == 50
    assert tokenizer.least_tokens("<" * 100) == 100
