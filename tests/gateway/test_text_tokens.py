"""Which tokens the log-probabilities of an answer list, and by what names: their bytes are its text, and two pieces have two."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest

from gateway.choices import pieces
from gateway.logprobs import TextColumns, TextTokens, TokenLogProb, TopToken, chat_columns
from gateway.request_context import RequestContext
from gateway.triton_client import Job, Piece

FLAMINGO = "\U0001f9a9".encode()


def raw(data: bytes, text: str = "") -> msgspec.Raw:
    return msgspec.Raw(json.dumps({"token": text, "logprob": -1.0, "bytes": [*data], "top": []}).encode())


def shown(found: list[msgspec.Raw]) -> list[bytes]:
    return [bytes(json.loads(bytes(one))["bytes"]) for one in found]


def test_what_begins_a_character_waits_for_its_end() -> None:
    tokens = TextTokens()
    assert shown(tokens.push([raw(b"a"), raw(b" " + FLAMINGO[:2])])) == [b"a"]
    assert shown(tokens.push([raw(FLAMINGO[2:3])])) == []
    assert shown(tokens.push([raw(FLAMINGO[3:]), raw(b"b")])) == [
        b" " + FLAMINGO[:2],
        FLAMINGO[2:3],
        FLAMINGO[3:],
        b"b",
    ]
    assert shown(tokens.push([raw(FLAMINGO[:3])])) == [], "a character that never ends is no text"


def test_bytes_that_are_no_beginning_are_text() -> None:
    assert shown(TextTokens().push([raw(b"\xff"), raw(b"\x80"), raw(b"\xc3"), raw(b"a")])) == [
        b"\xff",
        b"\x80",
        b"\xc3",
        b"a",
    ]


def test_all_of_them_have_the_bytes_of_the_text_however_it_is_cut() -> None:
    rng, texts = random.Random(7), ["größer", "人生", "👩\u200d👧🏳️", "ab c", "हिन्दी"]
    for _ in range(500):
        data = "".join(rng.choices(texts, k=3)).encode()[: rng.randrange(1, 40)]
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(8)))
        parts = [raw(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)])]
        tokens, found = TextTokens(), []
        while parts:
            count = rng.randrange(1, 4)
            found += tokens.push(parts[:count], count >= len(parts))
            parts = parts[count:]
        listed = b"".join(shown(found))
        assert listed.decode() == data.decode(errors="ignore"), "whole characters, and all of them"


@pytest.mark.parametrize(("include", "count"), [(False, 1), (True, 2)])
def test_the_token_that_ends_an_answer_is_no_part_of_it(include: bool, count: int) -> None:
    class Link:
        async def stream(self, job: Job) -> Any:
            tokens = [raw(b"a"), raw(b"<|im_end|>")]
            yield Piece(0, "a", [5, 9], tokens, finish_reason="stop", stop_reason=9)

    async def listed() -> Any:
        job = Job({"include_stop_in_output": include}, "r-0", "", 1, None)
        found: Any = Link()
        return [piece async for _, piece in pieces(found, [job], RequestContext())]

    (piece,) = asyncio.run(listed())
    assert len(piece.logprobs) == count and piece.token_ids == [5, 9]


def test_a_stop_string_or_a_limit_takes_no_token_away() -> None:
    assert len(TextTokens().push([raw(b"a"), raw(b"b")])) == 2


def test_pieces_of_a_character_are_called_by_their_bytes() -> None:
    others = [TopToken("", -1.0, [0xF0]), TopToken("", -2.0, [0xE2, 0x80]), TopToken("x", -3.0, [120])]
    token = TokenLogProb("🦩", -0.1, [0x9F, 0xA6, 0xA9], others)
    (entry,) = chat_columns([token])["content"]
    assert [one.token for one in (entry, *entry.top_logprobs)] == ["\\x9f\\xa6\\xa9", "\\xf0", "\\xe2\\x80", "x"]
    assert entry.bytes == [0x9F, 0xA6, 0xA9]
    columns = TextColumns()([token, TokenLogProb(" \ufffd", -1.0, [32, 0xF0], [])])
    assert columns["tokens"] == ["\\x9f\\xa6\\xa9", " \\xf0"] and len(columns["top_logprobs"][0]) == 4


def test_special_tokens_keep_their_names() -> None:
    assert chat_columns([TokenLogProb("<s>", -1.0, [], [])])["content"][0].token == "<s>"
