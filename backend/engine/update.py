"""Applies the results of a step to a sequence: counters, tokens, log-probabilities, finish reason."""

from __future__ import annotations

from msgspec.structs import replace

from backend.api.response import FinishReason
from backend.api.stats import EngineCounters
from backend.core.sequence import Sequence
from backend.core.step import SampledToken


def advance(seq: Sequence, num_tokens: int) -> tuple[int, int]:
    """Count `num_tokens` tokens that have run. Returns (context tokens, recomputed tokens) among them."""
    before = seq.num_computed_tokens
    seq.num_inflight_tokens -= num_tokens
    seq.num_computed_tokens = before + num_tokens
    is_context = seq.num_output_tokens == 0 or before < seq.num_tokens - 1
    context = num_tokens if is_context else 0
    recomputed = max(0, min(seq.num_computed_tokens, seq.max_computed_tokens) - before)
    seq.max_computed_tokens = max(seq.max_computed_tokens, seq.num_computed_tokens)
    seq.num_context_tokens += context
    seq.num_recomputed_tokens += recomputed
    return context, recomputed


def note_recomputed(seq: Sequence, now_ns: int) -> None:
    """A step has computed KV again that its latest interruption had lost."""
    *before, latest = seq.interruptions
    seq.interruptions = (*before, replace(latest, recomputed_ns=now_ns))


def advance_by_newest(seq: Sequence) -> None:
    """`advance` for a generation row: its token was sampled by the step before, so it is never a recomputed one."""
    seq.num_inflight_tokens -= 1
    seq.num_computed_tokens += 1
    seq.max_computed_tokens = seq.num_computed_tokens


def append_token(seq: Sequence, sample: SampledToken, now_ns: int) -> None:
    """Append a sampled token and the log-probabilities that the request asked for."""
    seq.token_ids.append(sample.token_id)
    seq.num_inflight_samples -= 1
    if sample.log_prob is not None:
        seq.log_probs.append(sample.log_prob)
        seq.cum_log_prob += sample.log_prob
    if seq.request.output_config.top_log_probs:
        seq.top_log_probs.append(sample.top_log_probs)
    if not seq.first_token_ns:
        seq.first_token_ns = now_ns
    seq.last_token_ns = now_ns


def append_run(
    seq: Sequence,
    samples: list[SampledToken],
    is_given: bool,
    counters: EngineCounters,
    now_ns: int,
    runs_again: bool = False,
) -> FinishReason:
    """Apply a row with drafts. `samples`: the accepted tokens and the one behind them, as plain steps would have sampled them;
    tokens behind the end of the sequence are dropped. `is_given`: the request brought the drafts. `runs_again`: the model has
    recurrent layers, whose state is that in front of the drafts: those accepted run once more. Returns the finish reason.
    """
    num_right, num_output = len(samples) - 1, seq.num_output_tokens
    counters.draft_tokens_total += seq.num_inflight_drafts
    counters.accepted_draft_tokens_total += num_right
    if not is_given:
        seq.num_guessed_tokens += seq.num_inflight_drafts
        seq.num_right_guesses += num_right
    reason = FinishReason.NOT_FINISHED
    for place, sample in enumerate(samples):
        if not (place and runs_again):
            advance_by_newest(seq)
        append_token(seq, sample, now_ns)
        reason = finish_reason(seq)
        if reason is not FinishReason.NOT_FINISHED:
            break
    seq.num_inflight_tokens = seq.num_inflight_samples = seq.num_inflight_drafts = 0  # the other drafts were rejected
    num_extra = seq.num_output_tokens - num_output - 1
    seq.max_computed_tokens = max(seq.max_computed_tokens, seq.num_computed_tokens + runs_again * num_extra)
    seq.num_extra_tokens += num_extra
    counters.generated_tokens_total += num_extra  # the caller counts one token for every row
    return reason


def finish_reason(seq: Sequence) -> FinishReason:
    """The finish reason after the newest token; NOT_FINISHED if it goes on. End ids precede stop words, stop words length."""
    request = seq.request
    num_output = len(seq.token_ids) - seq.num_prompt_tokens
    if num_output and num_output >= (request.sampling_config.min_tokens or 0):
        if seq.token_ids[-1] in request.end_ids:
            return FinishReason.END_ID
        if request.stop_words and any(_ends_with(seq, word) for word in request.stop_words):
            return FinishReason.STOP_WORDS
    if num_output >= seq.max_output_tokens or (request.ends_after_drafts and _is_after_drafts(seq)):
        return FinishReason.LENGTH
    return FinishReason.NOT_FINISHED


def _is_after_drafts(seq: Sequence) -> bool:
    """True if the newest output token differs from the request's draft at its place, or has none there."""
    drafts, num_output = seq.request.draft_tokens, seq.num_output_tokens
    return num_output > len(drafts) or (num_output > 0 and seq.token_ids[-1] != drafts[num_output - 1])


def _ends_with(seq: Sequence, word: list[int]) -> bool:
    return len(word) <= seq.num_output_tokens and seq.token_ids[-len(word) :] == word


def ends_with_its_batch(seq: Sequence, reason: FinishReason, keep_output_tokens: int | None) -> bool:
    """True if the final response waits for the end of its static batch. That of a session's turn never waits."""
    ended_by_itself = reason in (FinishReason.END_ID, FinishReason.STOP_WORDS, FinishReason.LENGTH)
    return ended_by_itself and keep_output_tokens is None and seq.session_key is None
