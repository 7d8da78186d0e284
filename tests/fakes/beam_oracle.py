"""Beam search written down plainly, over whole sequences: the reference for what the engine does row by row.

It follows Hugging Face's `generate(num_beams=k)`, with which tests/parity compares it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

TopTokens = Callable[
    [list[int], int], list[tuple[int, float]]
]  # (prompt + output, count) -> the most likely next tokens


class Beam(NamedTuple):
    tokens: list[int]
    total: float
    score: float
    reason: str


def beam_search(
    prompt: list[int],
    max_tokens: int,
    width: int,
    top_tokens: TopTokens,
    end_ids: tuple[int, ...] = (),
    stop_words: tuple[list[int], ...] = (),
    bad_words: tuple[list[int], ...] = (),
    min_tokens: int = 0,
    length_penalty: float = 0.0,
    early_stopping: int = 1,
    diversity: float = 0.0,
) -> list[Beam]:
    """The `width` best outputs, the best first."""
    running, done = [([], 0.0)], []
    count = width * (2 + len(end_ids) + len(stop_words)) + len(end_ids) + len(bad_words)
    for length in range(1, max_tokens + 1):
        options = []
        for tokens, total in running:
            whole = prompt + tokens
            allowed = []
            for token, log_prob in top_tokens(whole, count):
                is_bad = any((whole + [token])[-len(word) :] == word for word in bad_words)
                if not is_bad and not (token in end_ids and length <= min_tokens):
                    allowed.append((token, log_prob))
            options += [
                (total + lp + diversity * i, tokens + [token], total + lp) for i, (token, lp) in enumerate(allowed)
            ]
        options.sort(key=lambda option: -option[0])
        running = []
        for place, (_, tokens, total) in enumerate(options):
            reason = ""
            if length >= min_tokens and tokens[-1] in end_ids:
                reason = "END_ID"
            elif length >= min_tokens and any(tokens[-len(word) :] == word for word in stop_words):
                reason = "STOP_WORDS"
            elif length == max_tokens:
                reason = "LENGTH"
            if not reason:
                running.append((tokens, total))
            elif place < width:
                done.append(Beam(tokens, total, total / length**length_penalty, reason))
        done = sorted(done, key=lambda beam: -beam.score)[:width]
        running = running[:width]
        if not running or (len(done) == width and early_stopping == 1):
            break
        farthest = max_tokens if early_stopping not in (0, 1) and length_penalty > 0 else length
        if len(done) == width and running[0][1] / farthest**length_penalty <= done[-1].score:
            break
    return done
