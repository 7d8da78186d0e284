"""Log-probabilities, from the JSON of the Triton model to that of the clients.

Of a reply with 20 of them for each token there may be many megabytes. They stay as they came until they are encoded, which is
done SLICE tokens at a time.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.turns import Turns

SLICE = 100  # tokens, which take a millisecond or two when each has 20 others
Columns = dict[str, list[Any]]


class TopToken(msgspec.Struct, gc=False):
    token: str
    logprob: float | None  # None: the first token of a prompt
    bytes: list[int]


class TokenLogProb(TopToken):
    """As the Triton model tells it. `top`: the most likely tokens in this place."""

    top: list[TopToken] = []


class _ShownToken(TopToken):
    """As chat completions and responses show it."""

    top_logprobs: list[TopToken]


_decoder = msgspec.json.Decoder(TokenLogProb)


def chat_columns(tokens: list[TokenLogProb]) -> Columns:
    return {"content": [_ShownToken(token.token, token.logprob, token.bytes, token.top) for token in tokens]}


class TextColumns:
    """The four lists of a completion. Offsets count characters from the beginning of the text, over all calls."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, tokens: list[TokenLogProb]) -> Columns:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(token.bytes)))
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def _top(token: TokenLogProb) -> dict[str, float] | None:
    """The most likely tokens, and the chosen one where it is not among them; the likeliest of those with the same text."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for one in (*token.top, token):
        found.setdefault(one.token, one.logprob or 0.0)
    return found


def columns_of(tokens: list[msgspec.Raw], columns: Callable[[list[TokenLogProb]], Columns]) -> Columns:
    """The lists for a few tokens."""
    return columns([_decoder.decode(token) for token in tokens])


async def encoded(
    tokens: list[msgspec.Raw], columns: Callable[[list[TokenLogProb]], Columns], turns: Turns
) -> dict[str, msgspec.Raw]:
    """The JSON of each list for any number of tokens."""
    parts: dict[str, list[bytes]] = {name: [] for name in columns([])}
    for start in range(0, len(tokens), SLICE):
        await turns.next()
        for name, values in columns_of(tokens[start : start + SLICE], columns).items():
            parts[name].append(msgspec.json.encode(values)[1:-1])
    return {name: msgspec.Raw(b"[" + b",".join(slices) + b"]") for name, slices in parts.items()}
