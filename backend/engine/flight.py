"""Flight: a step on its way through the workers. StepRecord: what is kept of it when it has landed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from backend.api.errors import EverbatchError
from backend.api.stats import IterationStats
from backend.core.clock import Clock
from backend.core.sequence import Sequence
from backend.core.step import SequenceId, StepInput, StepOutput
from backend.scheduler.scheduler import StepPlan


@dataclass(slots=True)
class Flight:
    """A step that was submitted and has not been collected."""

    plan: StepPlan
    step: StepInput
    started_ns: int
    dropped: set[SequenceId] = field(default_factory=set)  # left the batch since: their rows count for nothing
    num_decoded_tokens: int | None = None  # of rows that generate, once it has landed; None: one for each of them

    @property
    def sequences(self) -> list[Sequence]:
        return [seq for seq, _ in self.plan.rows if seq.seq_id not in self.dropped]


def check_samples(step: StepInput, output: StepOutput) -> None:
    """Raise RuntimeError when the answers are not the step's, for the rows that sample, in their order."""
    if output.step_id != step.step_id:
        raise RuntimeError(f"the workers answered step {output.step_id}, expected is {step.step_id}")
    expected = [row.slot for row in step.rows if row.samples]
    if [sample.slot for sample in output.sampled] != expected:
        raise RuntimeError(f"the workers answered for slots {[s.slot for s in output.sampled]}, expected {expected}")
    if output.further:
        num_drafts = {row.slot: len(row.drafts) + row.num_guesses for row in step.rows}
        for slot, further in output.further.items():
            if len(further) > num_drafts.get(slot, 0):
                raise RuntimeError(f"the workers sampled {len(further)} tokens too many for slot {slot}")


class WorkerFailure(EverbatchError):
    """A step could not be executed; it ends the requests that took part in it."""


class StepRecord(NamedTuple):
    """Statistics are made of it when somebody asks."""

    iteration: int
    started_ns: int
    ended_ns: int
    num_completed: int
    num_generation: int
    num_context: int
    num_context_tokens: int
    num_empty_slots: int
    num_decoded_tokens: int

    def statistics(self, clock: Clock) -> IterationStats:
        return IterationStats(
            iter=self.iteration,
            timestamp_ns=clock.time_ns() - (clock.monotonic_ns() - self.ended_ns),
            iter_latency_ms=(self.ended_ns - self.started_ns) / 1e6,
            num_completed_requests=self.num_completed,
            num_scheduled_requests=self.num_generation + self.num_context,
            num_context_requests=self.num_context,
            num_gen_requests=self.num_generation,
            num_ctx_tokens=self.num_context_tokens,
            num_empty_gen_slots=self.num_empty_slots,
            num_gen_tokens=self.num_decoded_tokens,
        )
