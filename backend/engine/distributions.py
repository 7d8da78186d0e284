"""Adds values to the engine's histograms: at a sequence's first token, at its end, and after each step."""

from __future__ import annotations

from collections.abc import Iterable

from backend.api.distributions import Distributions
from backend.core.sequence import Sequence


def note_first_token(to: Distributions, seq: Sequence, now_ns: int) -> None:
    to.add("first_token_s", (now_ns - seq.arrival_ns) / 1e9)


def note_gaps(to: Distributions, tokens_before_ns: Iterable[int], now_ns: int) -> None:
    """Count the time since the token before, for each row of a step that brought tokens. Most rows share it."""
    rows: dict[int, int] = {}
    for before_ns in tokens_before_ns:
        rows[before_ns] = rows.get(before_ns, 0) + 1
    for before_ns, num_rows in rows.items():
        if before_ns:  # 0: another engine has sampled that token, at an unknown time
            to.add("between_tokens_s", (now_ns - before_ns) / 1e9, num_rows)


def note_sequence(to: Distributions, seq: Sequence, now_ns: int) -> None:
    """Count a sequence that ends without an error, and its request if it is the last one."""
    num_output = seq.num_output_tokens
    to.add("total_s", (now_ns - seq.arrival_ns) / 1e9)
    to.add("output_tokens", num_output)
    if seq.first_scheduled_ns:
        to.add("queue_s", max(0, seq.first_scheduled_ns - (seq.prepared_ns or seq.arrival_ns)) / 1e9)
    if seq.first_token_ns and seq.last_token_ns:
        generation_s = (seq.last_token_ns - seq.first_token_ns) / 1e9
        to.add("context_s", (seq.first_token_ns - seq.first_scheduled_ns) / 1e9)
        to.add("generation_s", generation_s)
        to.add("run_s", (seq.last_token_ns - seq.first_scheduled_ns) / 1e9)
        if num_output > 1:
            to.add("per_token_s", generation_s / (num_output - 1))
    if seq.group is not None:
        seq.group.most_output_tokens = max(seq.group.most_output_tokens, num_output)
    if seq.group is None or not seq.group.members:
        _note_request(to, seq)


def _note_request(to: Distributions, seq: Sequence) -> None:
    num_prompt = seq.num_prompt_tokens - seq.num_history_tokens
    sampling = seq.request.sampling_config
    to.add("prompt_tokens", num_prompt)
    to.add("computed_prompt_tokens", max(0, num_prompt - seq.num_cached_tokens))
    to.add("longest_output_tokens", seq.num_output_tokens if seq.group is None else seq.group.most_output_tokens)
    to.add("max_tokens", seq.request.max_tokens)
    to.add("num_sequences", sampling.num_return_sequences or sampling.beam_width)
