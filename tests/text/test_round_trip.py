"""Streamed text == text in one piece == the library's decode, and no stop string gets out: random ids, many tokenizers.

EVERBATCH_SEQUENCES=10000 sets how many sequences each test tries for each family; a few hundred otherwise.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from tests.text.random_sequences import (
    first_stop,
    random_cuts,
    random_ids,
    random_stops,
    text_in_characters,
    text_of_output,
)
from tests.text.tokenizers_made import FAMILIES, MORE_FAMILIES, made, write_directory

NUM_SEQUENCES = int(os.environ.get("EVERBATCH_SEQUENCES", "200"))
PROMPT_LENGTHS = [0, 0, 1, 2, 6, 90]

every_family = pytest.mark.parametrize("name", [*FAMILIES, *MORE_FAMILIES])


def streamed(stream: TextStream, parts: Sequence[Sequence[int]]) -> tuple[list[str], str | None, int]:
    """The texts of all responses, the stop string that ended them, and the number of tokens that count."""
    deltas = [*(stream.push(part) for part in parts), stream.flush()]
    return [delta.text for delta in deltas], deltas[-1].finished_by, deltas[-1].num_tokens_kept


@every_family
def test_streamed_text_is_the_text_in_one_piece_and_the_full_decode(name: str) -> None:
    tokenizer, rng = made(name), random.Random(name)
    for _ in range(NUM_SEQUENCES):
        prompt = random_ids(rng, tokenizer, rng.choice(PROMPT_LENGTHS))
        ids = random_ids(rng, tokenizer, rng.randrange(1, 30))
        skip = rng.random() < 0.7
        case = (prompt, ids, skip)

        expected = text_in_characters(tokenizer, prompt, ids, skip)
        parts = list(random_cuts(rng, ids))
        texts, stop, kept = streamed(TextStream(tokenizer, prompt, skip_special_tokens=skip), parts)
        whole, _, _ = streamed(TextStream(tokenizer, prompt, skip_special_tokens=skip), [ids])

        assert "".join(texts) == "".join(whole) == expected, case
        assert b"".join(text.encode() for text in texts) == expected.encode(), case  # each text is UTF-8 by itself
        assert (stop, kept) == (None, len(ids)), case


@every_family
def test_what_has_been_streamed_holds_whatever_follows(name: str) -> None:
    """Ids that end anywhere, then two different ends: what was sent before begins the texts of both."""
    tokenizer, rng = made(name), random.Random(name + "ends")
    for _ in range(NUM_SEQUENCES // 4):
        prompt, ids = random_ids(rng, tokenizer, 2), random_ids(rng, tokenizer, rng.randrange(1, 20))
        sent = TextStream(tokenizer, prompt).push(ids).text
        for end in ([], random_ids(rng, tokenizer, 3), random_ids(rng, tokenizer, 3)):
            assert text_of_output(tokenizer, prompt, [*ids, *end], True).startswith(sent), (prompt, ids, end)


@every_family
def test_no_stop_string_is_streamed_and_no_text_is_lost(name: str) -> None:
    tokenizer, rng = made(name), random.Random(name + "stops")
    seen: Counter[str] = Counter()
    for _ in range(NUM_SEQUENCES):
        prompt = random_ids(rng, tokenizer, rng.choice(PROMPT_LENGTHS))
        ids = random_ids(rng, tokenizer, rng.randrange(1, 30))
        skip, include = rng.random() < 0.7, rng.random() < 0.4
        text = text_in_characters(tokenizer, prompt, ids, skip)
        stops = random_stops(rng, text, [tokenizer.decode([token], skip) for token in ids])
        case = (prompt, ids, skip, stops, include)

        stream = TextStream(tokenizer, prompt, stops, include, skip)
        texts, stop, kept = streamed(stream, list(random_cuts(rng, ids)))

        found = first_stop(text, stops)
        if found is None:
            assert ("".join(texts), stop, kept) == (text, None, len(ids)), case
            seen["held back to the end"] += bool(texts[-1])
            continue
        end, expected_stop = found
        assert stop == expected_stop, case
        assert "".join(texts) == text[: end if include else end - len(stop)], case
        assert include or not any(each in "".join(texts) for each in stops), case
        assert kept == least_tokens(tokenizer, prompt, ids, text[:end], skip), case
        before = text_of_output(tokenizer, prompt, ids[: kept - 1], skip)
        seen["within one token" if len(before) <= end - len(stop) else "across tokens"] += 1
        seen["within ASCII" if stop.isascii() else "beyond ASCII"] += 1
    kinds = {"held back to the end", "within one token", "across tokens", "within ASCII", "beyond ASCII"}
    assert set(seen) == kinds or NUM_SEQUENCES < 100, seen  # every kind of stop string was tried


@every_family
@pytest.mark.parametrize("skip", [True, False])
def test_the_full_decode_is_that_of_transformers(name: str, skip: bool, tmp_path: Path) -> None:
    tokenizer, rng = made(name), random.Random(name + "decode")
    backend, config = Backend.from_str(tokenizer._backend.to_str()), {**FAMILIES, **MORE_FAMILIES}[name]()[1]
    theirs = PreTrainedTokenizerFast.from_pretrained(write_directory(tmp_path, backend, config))
    for _ in range(NUM_SEQUENCES // 4):
        ids = random_ids(rng, tokenizer, 20)
        assert tokenizer.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), ids


def least_tokens(tokenizer: Tokenizer, prompt: list[int], ids: list[int], text: str, skip: bool) -> int:
    """The least number of output tokens whose text holds all of `text`."""
    return next(n for n in range(len(ids) + 1) if text_of_output(tokenizer, prompt, ids[:n], skip).startswith(text))
