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


class _Bytes(msgspec.Struct, gc=False):
    """The bytes that a token adds to the text."""

    bytes: list[int]


_bytes_decoder = msgspec.json.Decoder(_Bytes)


class TextTokens:
    """The tokens that make up the text of an answer, as they come: joined, their bytes are the bytes of the text.

    The token that ended the answer is none of them, and neither are those that only begin a character. What may turn out to be
    the beginning of one is held back until it is whole. Of a token with text in front of the beginning of one, which is the
    last of an answer, the bytes are those of that text.
    """

    def __init__(self) -> None:
        self._held: list[msgspec.Raw] = []
        self._torn = b""  # bytes of the character that the held ones begin

    def push(self, tokens: list[msgspec.Raw], is_last: bool = False, ended_by_last: bool = False) -> list[msgspec.Raw]:
        """`is_last`: no more follow. `ended_by_last`: the last one is the token that ended the answer."""
        whole: list[msgspec.Raw] = []
        for token in tokens[: len(tokens) - ended_by_last]:
            data = self._torn + bytes(_bytes_decoder.decode(token).bytes)
            self._torn = data[codecs.utf_8_decode(data, "replace", False)[1] :]
            self._held.append(token)
            if not self._torn:
                whole += self._held
                self._held = []
        return whole + self._without_torn() if is_last else whole

    def _without_torn(self) -> list[msgspec.Raw]:
        """The held tokens as far as they are text."""
        kept: list[msgspec.Raw] = []
        torn = len(self._torn)
        for token in map(_decoder.decode, reversed(self._held)):
            is_whole, size = not torn, max(0, len(token.bytes) - torn)
            torn -= len(token.bytes) - size
            token.bytes = token.bytes[:size]
            if is_whole or size:
                kept.append(msgspec.Raw(msgspec.json.encode(token)))
        return kept[::-1]


def _name(token: TopToken) -> str:
    """A token's text; of a piece of a character its bytes, as OpenAI writes them, so that two pieces have two names."""
    data = bytes(token.bytes)
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", "backslashreplace")
    return token.token


def _named(token: TopToken) -> TopToken:
    return TopToken(_name(token), token.logprob, token.bytes)


def chat_columns(tokens: list[TokenLogProb]) -> Columns:
    shown = (_ShownToken(_name(one), one.logprob, one.bytes, list(map(_named, one.top))) for one in tokens)
    return {"content": list(shown)}


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
            "tokens": [_name(token) for token in tokens],
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
        found.setdefault(_name(one), one.logprob or 0.0)
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


class _PromptToken(msgspec.Struct, gc=False):
    token_id: int
    token: str
    logprob: float | None  # None: the first token, which follows nothing
    bytes: list[int] = []
    top: list[_PromptToken] = []


_prompt_decoder = msgspec.json.Decoder(_PromptToken)


async def prompt_scores(tokens: list[msgspec.Raw], turns: Turns) -> msgspec.Raw:
    """The JSON of vLLM's `prompt_logprobs`: for each token of the prompt its log-probability and those of the likeliest in its
    place, by ids; null for the first token. `rank` is null for a token that is none of the likeliest.
    """
    slices = []
    for start in range(0, len(tokens), SLICE):
        await turns.next()
        part = [_scores(_prompt_decoder.decode(token)) for token in tokens[start : start + SLICE]]
        slices.append(msgspec.json.encode(part)[1:-1])
    return msgspec.Raw(b"[" + b",".join(slices) + b"]")


def _scores(token: _PromptToken) -> dict[str, Any] | None:
    if token.logprob is None:
        return None
    found = {str(token.token_id): {"logprob": token.logprob, "rank": None, "decoded_token": token.token}}
    for rank, one in enumerate(token.top, 1):
        found[str(one.token_id)] = {"logprob": one.logprob, "rank": rank, "decoded_token": one.token}
    return found
