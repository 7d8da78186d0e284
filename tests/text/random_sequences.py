"""Random token ids, random cuts and random stop strings, for round trips through the text modules."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Iterator, Sequence
from os.path import commonprefix

from backend.text.decoding import byte_level_bytes, fallback_byte
from backend.text.tokenizer import Tokenizer

SCRIPTS = [
    "The quick fox isn't . Really ?",
    "größer Łódź naïve",
    "это ещё чай",
    "人人生而自由律",
    "👩‍👩‍👧🏳️‍🌈🙂",
    "ไทย हिन्दी",
    " \n\t  ",
]


def random_ids(rng: random.Random, tokenizer: Tokenizer, length: int) -> list[int]:
    """Ids of one of three kinds: all over the vocabulary and a little beyond it, of one region, or of a text.

    Bytes, added tokens and blanks stand together in one region of most vocabularies. The tokens of a text have some
    left out and some changed, so that characters lose their middle or end.
    """
    kind = rng.randrange(3)
    if kind == 0:
        return [rng.randrange(tokenizer.vocab_size + 2) for _ in range(length)]
    if kind == 1:
        start, width = rng.randrange(tokenizer.vocab_size), rng.choice([3, 30, 270])
        return [(start + rng.randrange(width)) % tokenizer.vocab_size for _ in range(length)]
    script = rng.choice(SCRIPTS)
    ids = tokenizer.encode("".join(rng.choices(script, k=length)), add_special_tokens=False)
    ids = [token for token in ids if rng.random() < 0.95]
    return [rng.randrange(tokenizer.vocab_size) if rng.random() < 0.05 else token for token in ids][:length]


def random_cuts(rng: random.Random, ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """`ids` as they might come in responses: parts of random sizes, now and then an empty one."""
    sizes = rng.choice([[1], [1, 1, 1, 2, 5], [0, 1, 2, 20]])
    while ids:
        size = rng.choice(sizes)
        yield ids[:size]
        ids = ids[size:]


def text_of_output(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool) -> str:
    """What detokenizer.py defines as the text of an output, by two decodes of the library.

    It is the text of prompt and output without what it has in common with the text of the prompt.
    """
    start, full = tokenizer.decode(prompt, skip), tokenizer.decode([*prompt, *ids], skip)
    return full[len(commonprefix([start, full])) :]


def text_in_characters(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool) -> str:
    """The same without the character that the output begins and does not end: the library decodes its bytes to U+FFFD."""
    shown = [one for one in (*prompt, *ids) if tokenizer.visible_token(one, skip) is not None]
    tail = b"".join(_bytes_of(tokenizer, one, skip) for one in shown[-8:])
    torn = len(tail) - codecs.utf_8_decode(tail, "replace", False)[1]
    if torn == 0:
        return text_of_output(tokenizer, prompt, ids, skip)
    start = tokenizer.decode(prompt, skip)
    full = tokenizer.decode(shown, skip)[:-1] if tokenizer.is_byte_level else tokenizer.decode(shown[:-torn], skip)
    return full[len(commonprefix([start, full])) :]


def _bytes_of(tokenizer: Tokenizer, token_id: int, skip: bool) -> bytes:
    """The bytes of a token that may end inside a character; a full stop for one that cannot."""
    token = tokenizer.visible_token(token_id, skip) or ""
    if tokenizer.is_byte_level:
        return byte_level_bytes(token)
    byte = fallback_byte(token) if "ByteFallback" in json.dumps(json.loads(tokenizer.to_json())["decoder"]) else None
    return b"." if byte is None else bytes([byte])


def random_stops(rng: random.Random, text: str, tokens: Sequence[str]) -> list[str]:
    """One to four stop strings for a text and the texts of its tokens; most of them occur in it, or almost."""
    if rng.random() < 0.2:
        return [text[-rng.randrange(1, 6) :] + "\u0000"]  # the output ends with its beginning
    stops: list[str] = []
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(text) + 1)
        wide = [place for place, char in enumerate(text) if ord(char) > 0x7F] or [at]
        token = rng.choice(tokens) if tokens else ""
        stops.append(
            rng.choice(
                [
                    text[at : at + rng.randrange(1, 4)],  # often inside a token
                    text[at : at + rng.randrange(4, 25)],  # across tokens
                    text[: rng.randrange(1, 4)],  # where the output begins
                    token,
                    token[1:],
                    text[-rng.randrange(1, 6) :]
                    + rng.choice(["", "x"]),  # the end of the output holds it, or begins it
                    "".join(text[place : place + 1] for place in wide[:2]),
                    text[rng.choice(wide) :][:2],
                    text[at : at + 3] + "\u0000",  # almost
                    text[at : at + 1] * 2,
                ]
            )
        )
    near = rng.choice(stops)
    stops += rng.choice([[], [near[:-1]], [near + "a"], [near[1:]], [near[:-1] + "é", near]])  # that overlap
    return [stop for stop in stops if stop]


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the text ends by the rule of stop_strings.py, and by which stop: the earliest end, there the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text.endswith(stop, 0, end)]
        if found:
            return end, max(found, key=len)
    return None
