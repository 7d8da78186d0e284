"""Applies a landed step to its sequences: counters, KV and tokens. (Steps of beams: beam_step.py.)"""

from __future__ import annotations

from backend.api.response import FinishReason
from backend.core.sequence import Sequence
from backend.core.step import StepOutput
from backend.engine import groups, update
from backend.engine.distributions import note_first_token, note_gaps
from backend.engine.statistics import Statistics
from backend.engine.steps_in_flight import StepInFlight
from backend.kvcache.manager import KVCacheManager


def apply(
    flight: StepInFlight, output: StepOutput, kv: KVCacheManager, statistics: Statistics, now_ns: int
) -> list[tuple[Sequence, FinishReason]]:
    """Apply a step. Returns (sequence, finish reason) for those with new tokens, in row order."""
    plan, dropped, counters, distributions = flight.plan, flight.dropped, statistics.counters, statistics.distributions
    tokens_before_ns: list[int] = []
    news: list[tuple[Sequence, FinishReason]] = []
    samples, num_generated_before = iter(output.sampled), counters.generated_tokens_total
    for seq, sample in zip(plan.generation, samples):
        if dropped and seq.seq_id in dropped:
            continue
        tokens_before_ns.append(seq.last_token_ns)
        if seq.num_inflight_drafts:
            run, is_given = [sample, *output.further.get(sample.slot, ())], plan.drafts[seq.seq_id].is_given
            news.append((seq, update.append_run(seq, run, is_given, counters, now_ns, kv.states is not None)))
            if seq.num_computed_tokens >= seq.kv_due_at:
                kv.advance(seq)
            continue
        update.advance_by_newest(seq)
        if seq.num_computed_tokens >= seq.kv_due_at:
            kv.advance(seq)
        update.append_token(seq, sample, now_ns)
        news.append((seq, update.finish_reason(seq)))
    note_gaps(distributions, tokens_before_ns, now_ns)
    counters.generated_tokens_total += len(news)
    flight.num_decoded_tokens = counters.generated_tokens_total - num_generated_before
    rows = flight.step.rows[len(plan.generation) :]
    for (seq, num_tokens), row in zip(plan.context, rows, strict=True):
        first = next(samples) if row.samples else None  # the first token of the output
        if seq.seq_id in dropped:
            continue
        context, recomputed = update.advance(seq, num_tokens)
        counters.context_tokens_total += context
        counters.recomputed_tokens_total += recomputed
        if recomputed and seq.interruptions:
            update.note_recomputed(seq, now_ns)
        kv.advance(seq)
        if seq.group is not None:
            groups.share_prompt(seq, kv)
        if first is not None:
            if not seq.first_token_ns:
                seq.first_iteration = flight.step.step_id
                counters.answered_prompt_tokens_total += seq.num_prompt_tokens - seq.num_history_tokens
                counters.answered_cached_tokens_total += seq.num_cached_tokens
                note_first_token(distributions, seq, now_ns)
            update.append_token(seq, first, now_ns)
            counters.generated_tokens_total += 1
        asked_for_no_output = first is None and not seq.num_uncomputed_tokens + seq.num_inflight_tokens
        if first is not None or asked_for_no_output:
            news.append((seq, update.finish_reason(seq)))
    return news
