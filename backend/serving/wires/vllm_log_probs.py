"""The output `logprobs` of model `vllm`: JSON with an object for each token, which holds that token and the most likely ones.

    [{"262": {"logprob": -0.31, "rank": 1, "decoded_token": " the"}, "257": {"logprob": -1.7, "rank": 2, ...}}, ...]

The texts of the tokens, joined, are the text of the response; the last token has the text that the end of the output adds. The
rank of a sampled token is exact up to limits.max_top_log_probs (greedy: always), and that limit plus one beyond.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from backend.api.response import TopLogProb
from backend.text.accumulator import OutputDelta
from backend.text.token_texts import TokenTexts

LEAST = -9999.0  # in place of the logarithm of 0, which JSON cannot hold


class LogProb(Struct):
    logprob: float
    rank: int
    decoded_token: str


def log_probs_json(delta: OutputDelta, texts: TokenTexts, num_top: int) -> bytes:
    """The log-probabilities of the response's tokens, each with the `num_top` most likely of its position."""
    positions: list[dict[str, LogProb]] = []
    tops = delta.top_log_probs or [[] for _ in delta.ids]
    last: LogProb | None = None
    for token_id, log_prob, top in zip(delta.ids, delta.log_probs or [], tops):
        position = _most_likely(top[:num_top], texts)
        last = LogProb(max(log_prob, LEAST), _rank(token_id, top), texts.push(token_id).text)
        positions.append(position | {str(token_id): last})
    if last is not None and delta.finish is not None:
        last.decoded_token += texts.flush()
    return msgspec.json.encode(positions)


def _most_likely(top: list[TopLogProb], texts: TokenTexts) -> dict[str, LogProb]:
    return {
        str(one.token_id): LogProb(max(one.log_prob, LEAST), rank, texts.alternative(one.token_id).text)
        for rank, one in enumerate(top, start=1)
    }


def _rank(token_id: int, top: list[TopLogProb]) -> int:
    places = (rank for rank, one in enumerate(top, start=1) if one.token_id == token_id)
    return next(places, len(top) + 1)
