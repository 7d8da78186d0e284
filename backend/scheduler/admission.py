"""Counts pauses, and what an admission has found in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from backend.api.response import Interruption
from backend.core.sequence import Sequence
from backend.scheduler.plan import StepPlan

MOST_INTERRUPTIONS = 32  # a request remembers the times of this many; further ones are only counted


def note_pause(seq: Sequence, now_ns: int) -> None:
    seq.num_pauses += 1
    if len(seq.interruptions) < MOST_INTERRUPTIONS:
        seq.interruptions = (*seq.interruptions, Interruption(paused_ns=now_ns))


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
        plan.num_queried_tokens += seq.num_tokens
    else:  # it was paused within its prompt, and others have computed more of it since
        more = max(0, own - max(seq.max_computed_tokens, seq.num_cached_tokens))
        seq.num_cached_tokens += more
        plan.num_cached_tokens += more
    has_lost = seq.num_computed_tokens < min(known, seq.max_found_tokens)
    seq.num_evictions += has_lost or grant.own_lost > 0
    _note_return(seq, max(min(known, seq.max_found_tokens) - seq.num_computed_tokens, grant.own_lost, 0), now_ns)
    plan.num_evicted += has_lost or grant.lost > 0
    plan.num_lost_tokens += grant.lost


def _note_return(seq: Sequence, num_lost: int, now_ns: int) -> None:
    """Complete the record of its pause; KV that was lost without one, between two turns of a session, makes a record too."""
    earlier = seq.interruptions
    if earlier and not earlier[-1].returned_ns:
        ended = replace(earlier[-1], returned_ns=now_ns, num_lost_tokens=num_lost)
        seq.interruptions = (*earlier[:-1], ended)
    elif num_lost and len(earlier) < MOST_INTERRUPTIONS:
        seq.interruptions = (*earlier, Interruption(returned_ns=now_ns, num_lost_tokens=num_lost))


class LevelLoads(Protocol):
    """KV that comes from the second level while its sequence waits, as the scheduler sees it."""

    # How many tokens are to be computed before those of a new admission; set by the scheduler.
    queued_tokens: Callable[[], int]

    def is_loading(self, seq: Sequence) -> bool:
        """True while a waiting sequence is passed over."""
        ...

    def holds_back(self, seq: Sequence, num_found_tokens: int) -> bool:
        """True if a load has been begun for a sequence that could be admitted now. To begin one changes no plan, queue or block;
        asked again, the answer is False.
        """
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence has been admitted, or has left the queue."""
        ...

    def note_step(self, num_context_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts has taken so long."""
        ...
