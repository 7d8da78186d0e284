"""Streaming text equals the full decode, for random token ids of six tokenizer families."""

from __future__ import annotations

import random
from collections.abc import Iterator
from os.path import commonprefix
from typing import Any

import pytest

from backend.text.detokenizer import IncrementalDetokenizer
from backend.text.tokenizer import Tokenizer

SEQUENCES_PER_FAMILY = 2000  # six families: 12,000 in all


def random_ids(rng: random.Random, tokenizer: Tokenizer, length: int) -> list[int]:
    """Half of the sequences stay in one region of the vocabulary: bytes, specials and blanks come in clusters there."""
    if rng.random() < 0.5:
        return [rng.randrange(tokenizer.vocab_size + 2) for _ in range(length)]
    start, width = rng.randrange(tokenizer.vocab_size), rng.choice([3, 30, 270])
    return [(start + rng.randrange(width)) % tokenizer.vocab_size for _ in range(length)]


def split(rng: random.Random, ids: list[int]) -> Iterator[list[int]]:
    while ids:
        size = rng.choice([1, 1, 1, 2, 5])
        yield ids[:size]
        ids = ids[size:]


def expected_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    """The definition in detokenizer.py, by the library's own decode."""
    start, full = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + ids, skip)
    return full[len(commonprefix([start, full])) :]


def stream(rng: random.Random, tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*[detokenizer.push(part) for part in split(rng, ids)], detokenizer.flush()]


@pytest.mark.feature("003-11")
def test_the_chunks_add_up_to_the_full_decode(tokenizer: Tokenizer, family: str) -> None:
    rng = random.Random(family)
    exact = 0
    for _ in range(SEQUENCES_PER_FAMILY):
        prompt = random_ids(rng, tokenizer, rng.choice([0, 0, 1, 2, 6, 90]))
        ids = random_ids(rng, tokenizer, rng.randrange(1, 25))
        skip = rng.random() < 0.7
        chunks = stream(rng, tokenizer, prompt, ids, skip)
        text = "".join(chunks)
        assert text == expected_text(tokenizer, prompt, ids, skip), (prompt, ids, chunks)
        start, full = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + ids, skip)
        if full.startswith(start):
            exact += 1
            assert text == full[len(start) :]
        if "\ufffd" not in full:
            assert not any("\ufffd" in chunk for chunk in chunks)
    assert exact > SEQUENCES_PER_FAMILY * 0.6


def test_what_a_token_would_add_is_told_from_the_place_where_the_output_is_now(
    tokenizer: Tokenizer, family: str
) -> None:
    """Asked at each place, it is what a detokenizer tells that was never asked before, and pushes what it was."""
    rng = random.Random(family)
    for _ in range(SEQUENCES_PER_FAMILY // 50):
        ids, others = random_ids(rng, tokenizer, 8), random_ids(rng, tokenizer, 3)
        asked = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        for place in range(len(ids)):
            fresh = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
            fresh.push(ids[:place])
            for other in others:
                new = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
                new.push(ids[:place])
                assert asked.text_with(other) == new.text_with(other), (ids, place, other)
            assert asked.push(ids[place : place + 1]) == fresh.push(ids[place : place + 1])


@pytest.mark.feature("003-11")
@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 and 🏳️‍🌈!", "日本語のテキスト、漢字。", "ไทยไม่เว้นวรรค", "Ω≈ç√ naïve é ü"])
def test_real_text_streams_without_a_replacement_character(family_tokenizers: dict[str, Tokenizer], text: str) -> None:
    for name in ("byte_level_bpe", "sentencepiece_bpe", "unigram"):
        tokenizer = family_tokenizers[name]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) > 8  # most characters take several tokens
        chunks = stream(random.Random(1), tokenizer, [], ids, skip=True)
        assert "".join(chunks) == text
        assert not any("\ufffd" in chunk for chunk in chunks)


def test_a_byte_level_character_comes_out_with_its_last_byte(family_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = family_tokenizers["byte_level_bpe"]
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert not detokenizer.holds and detokenizer.flush() == ""


def test_an_invalid_end_is_flushed_as_the_full_decode_has_it(family_tokenizers: dict[str, Tokenizer]) -> None:
    for name in ("byte_level_bpe", "sentencepiece_bpe", "unigram"):
        tokenizer = family_tokenizers[name]
        ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
        detokenizer = IncrementalDetokenizer(tokenizer)
        text = detokenizer.push(ids)
        assert "\ufffd" not in text
        assert text + detokenizer.peek() == text + detokenizer.flush() == tokenizer.decode(ids)


def test_output_may_complete_a_character_that_the_prompt_began(family_tokenizers: dict[str, Tokenizer]) -> None:
    for name in ("byte_level_bpe", "sentencepiece_bpe"):
        tokenizer = family_tokenizers[name]
        ids = tokenizer.encode("a🙂b", add_special_tokens=False)
        for cut in range(1, len(ids)):
            detokenizer = IncrementalDetokenizer(tokenizer, ids[:cut])
            text = detokenizer.push(ids[cut:]) + detokenizer.flush()
            assert text == expected_text(tokenizer, ids[:cut], ids[cut:], True)


def test_the_first_word_after_a_prompt_keeps_its_space_even_behind_special_tokens(
    family_tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = family_tokenizers["sentencepiece_bpe"]
    word = tokenizer.encode("fox", add_special_tokens=False)  # begins with the space that a text loses
    bos = [tokenizer.bos_id] * 70
    assert "".join(stream(random.Random(0), tokenizer, bos, word, True)) == "fox"
    prompt = tokenizer.encode("The quick") + bos
    assert "".join(stream(random.Random(0), tokenizer, prompt, word, True)) == " fox"


@pytest.mark.feature("003-11")
def test_state_is_rebuilt_from_token_ids_alone(tokenizer: Tokenizer, family: str) -> None:
    rng = random.Random(family + "x")
    for _ in range(100):
        prompt, ids = random_ids(rng, tokenizer, 10), random_ids(rng, tokenizer, 20)
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        emitted = ""
        for cut in range(len(ids)):
            emitted += detokenizer.push(ids[cut : cut + 1])
            rebuilt = IncrementalDetokenizer(tokenizer, prompt)
            assert rebuilt.push(ids[: cut + 1]) == emitted
            assert rebuilt.peek() == detokenizer.peek()


def test_a_long_prompt_is_read_from_its_end_only(tokenizer: Tokenizer, family: str) -> None:
    rng = random.Random(family + "long")
    for _ in range(60):
        prompt, ids = random_ids(rng, tokenizer, 400), random_ids(rng, tokenizer, 12)
        text = "".join(stream(rng, tokenizer, prompt, ids, True))
        assert text == expected_text(tokenizer, prompt, ids, True)


def test_the_cost_of_a_push_does_not_grow_with_the_output(family_tokenizers: dict[str, Tokenizer]) -> None:
    """Counted in tokens handed to the pipeline, not in seconds."""
    for tokenizer in family_tokenizers.values():
        detokenizer = IncrementalDetokenizer(tokenizer, random_ids(random.Random(2), tokenizer, 500))
        pushed = count_pushes(detokenizer)
        ids = random_ids(random.Random(3), tokenizer, 3000)
        for token in ids:
            detokenizer.push([token])
        assert 0 < len(pushed) <= len(ids)


def count_pushes(detokenizer: IncrementalDetokenizer) -> list[str]:
    """A list that grows by every token that the detokenizer hands to its pipeline from now on."""
    pushed: list[str] = []
    push = detokenizer._pipeline.push

    def noted(token: str) -> Any:
        pushed.append(token)
        return push(token)

    detokenizer._pipeline.push = noted
    return pushed
