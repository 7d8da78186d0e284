"""Flight: a step on its way through the workers."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    @property
    def sequences(self) -> list[Sequence]:
        return [seq for seq, _ in self.plan.rows if seq.seq_id not in self.dropped]


def check_samples(step: StepInput, output: StepOutput) -> None:
    """Raise RuntimeError when the answers are not those of the rows that sample, in their order."""
    expected = [row.slot for row in step.rows if row.samples]
    if [sample.slot for sample in output.sampled] != expected:
        raise RuntimeError(f"the workers answered for slots {[s.slot for s in output.sampled]}, expected {expected}")
