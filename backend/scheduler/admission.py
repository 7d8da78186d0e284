"""Counts what an admission has found in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.core.sequence import Sequence

if TYPE_CHECKING:
    from backend.scheduler.scheduler import StepPlan


def note_admission(plan: StepPlan, seq: Sequence, known: int, now_ns: int) -> None:
    """Count what an admission found: KV that is reused, and KV evicted since the sequence last ran (`known` tokens then).

    Reuse of KV that other clients computed is not reported: to the client these tokens count as run.
    """
    grant = plan.kv.grants[seq.seq_id]
    own = grant.own
    seq.num_context_tokens += seq.num_computed_tokens - own
    seq.num_recomputed_tokens += max(0, min(seq.num_computed_tokens, seq.max_computed_tokens) - own) + grant.own_lost
    if not seq.first_scheduled_ns:
        seq.first_scheduled_ns = now_ns
        seq.num_cached_tokens = own
        plan.num_cached_tokens += seq.num_computed_tokens
    else:  # it was paused within its prompt, and others have computed more of it since
        more = max(0, own - max(seq.max_computed_tokens, seq.num_cached_tokens))
        seq.num_cached_tokens += more
        plan.num_cached_tokens += more
    has_lost = seq.num_computed_tokens < min(known, seq.max_found_tokens)
    seq.num_evictions += has_lost or grant.own_lost > 0
    plan.num_evicted += has_lost or grant.lost > 0
    plan.num_lost_tokens += grant.lost
