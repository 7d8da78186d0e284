"""The spans of a request, made of what is known once it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from backend.api import PerfMetrics
from backend.serving.observe.ended import EndedRow

Value = str | int | float | tuple[str, ...]
REQUEST = "llm_request"  # the name that vLLM gives it
FAILED = ("error", "refused")


class Span(NamedTuple):
    """Times in nanoseconds of CLOCK_MONOTONIC. The first span of a request is its own, the others lie in it."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]


def spans_of(row: EndedRow, model: str) -> list[Span]:
    """The request's span, then those of its stages. Stages that another clock has measured, as that of a machine elsewhere, are
    left out: they would lie outside of the request.
    """
    stages = [] if row.account is None else list(_stages(row.account))
    inside = [span for span in stages if row.received_ns <= span.start_ns <= span.end_ns <= row.ended_ns]
    return [Span(REQUEST, row.received_ns, row.ended_ns, dict(_about(row, model))), *inside]


def _stages(account: PerfMetrics) -> Iterator[Span]:
    if account.prepared_ns:
        yield Span("prepare", account.arrival_ns, account.prepared_ns, {})
    if account.first_scheduled_ns:
        yield Span("queue", account.queued_ns, account.first_scheduled_ns, {})
        if account.first_token_ns:
            about: dict[str, Value] = {
                "everbatch.context_tokens": account.num_context_tokens,
                "everbatch.cached_tokens": account.num_cached_tokens,
            }
            yield Span("context", account.first_scheduled_ns, account.first_token_ns, about)
    if account.first_token_ns and account.last_token_ns:
        tokens: dict[str, Value] = {"gen_ai.usage.output_tokens": account.num_output_tokens}
        yield Span("generation", account.first_token_ns, account.last_token_ns, tokens)
    for each in account.interruptions:
        if each.paused_ns and each.returned_ns:
            yield Span("pause", each.paused_ns, each.returned_ns, {})
        if each.num_lost_tokens:
            lost: dict[str, Value] = {"everbatch.lost_tokens": each.num_lost_tokens}
            yield Span("evict", each.returned_ns, each.returned_ns, lost)  # when it was found to have happened
            if each.recomputed_ns:
                yield Span("recompute", each.returned_ns, each.recomputed_ns, lost)


def _about(row: EndedRow, model: str) -> Iterator[tuple[str, Value]]:
    """Attributes of OpenTelemetry's semantic conventions for generative AI; never a text or a token."""
    yield "gen_ai.operation.name", "text_completion"
    yield "gen_ai.provider.name", "everbatch"
    yield "gen_ai.request.model", model
    yield "gen_ai.request.id", row.request_id
    yield "gen_ai.request.choice.count", row.num_sequences
    yield "gen_ai.usage.input_tokens", row.num_prompt_tokens
    yield "gen_ai.usage.output_tokens", row.num_output_tokens
    yield "gen_ai.response.finish_reasons", (row.reason,)
    if row.reason in FAILED:
        yield "error.type", row.code or row.reason
    if row.account is not None:
        yield "gen_ai.usage.cache_read.input_tokens", row.account.num_cached_tokens
        yield "everbatch.recomputed_tokens", row.account.num_recomputed_tokens
        yield "everbatch.pauses", row.account.num_pauses
        yield "everbatch.evictions", row.account.num_evictions
    if row.queue_s is not None:
        yield "gen_ai.latency.time_in_queue", row.queue_s
    if row.first_token_s is not None:
        yield "gen_ai.latency.time_to_first_token", row.first_token_s
    yield "gen_ai.latency.e2e", row.total_s
