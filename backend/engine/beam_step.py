"""Applies a landed step of beams: first its rows, then each search whose hypotheses all have their candidates."""

from __future__ import annotations

from backend.api.errors import InvalidRequest
from backend.api.guide import no_token_left
from backend.api.request import Request
from backend.api.response import FinishReason
from backend.api.stats import EngineCounters
from backend.core.sequence import BeamSequence
from backend.core.step import StepOutput
from backend.engine import beams, update
from backend.engine.beams import BeamSearch, search_of
from backend.engine.steps_in_flight import StepInFlight
from backend.kvcache.manager import KVCacheManager
from backend.scheduler.scheduler import Scheduler


def apply(flight: StepInFlight, output: StepOutput, kv: KVCacheManager, counters: EngineCounters) -> list[BeamSearch]:
    """Apply a step to its sequences: counters, KV, candidates. Returns the searches that had rows in it, in row order."""
    samples = iter(output.sampled)
    searches: dict[int, BeamSearch] = {}
    for (seq, num_tokens), row in zip(flight.plan.rows, flight.step.rows, strict=True):
        candidates = next(samples) if row.samples else None
        if seq.seq_id in flight.dropped:
            continue
        context, recomputed = update.advance(seq, num_tokens)
        counters.context_tokens_total += context
        counters.recomputed_tokens_total += recomputed
        if seq.num_computed_tokens >= seq.kv_due_at:
            kv.advance(seq, max_shared_tokens=seq.num_prompt_tokens)
        if candidates is not None:
            assert isinstance(seq, BeamSequence)  # all rows of such a step belong to beams
            seq.num_inflight_samples -= 1
            seq.candidates = candidates
            if not seq.first_token_ns:
                seq.first_iteration = flight.step.step_id
            counters.generated_tokens_total += 1
        searches[seq.request_id] = search_of(seq)
    return list(searches.values())


def take_further(
    search: BeamSearch, kv: KVCacheManager, scheduler: Scheduler, now_ns: int
) -> FinishReason | InvalidRequest | None:
    """Advance a search by one token if it is ready. Returns its finish reason; None if nothing has changed."""
    first = search.members[0]
    if not first.max_output_tokens:
        return None if first.num_uncomputed_tokens + first.num_inflight_tokens else FinishReason.LENGTH
    if not search.is_ready:
        return None
    if beams.advance(search, kv, scheduler, now_ns):
        return search.ended[0].reason if search.ended else _stuck(first.request)
    return FinishReason.NOT_FINISHED


def _stuck(request: Request) -> InvalidRequest:
    bans = {"bad_words": bool(request.bad_words), "min_tokens": bool(request.sampling_config.min_tokens)}
    return no_token_left([name for name, is_sent in bans.items() if is_sent], request.guide)
