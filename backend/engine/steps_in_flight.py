"""Steps that the workers run (Flight, StepsInFlight), and the figures kept of a landed step (StepRecord)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from backend.api.errors import EverbatchError
from backend.api.stats import IterationStats
from backend.core.clock import Clock
from backend.core.sequence import Sequence
from backend.core.step import SequenceId, StepInput, StepOutput, WorkerGroup
from backend.scheduler.plan import StepPlan


@dataclass(slots=True)
class StepInFlight:
    """A step that was submitted and has not been collected."""

    plan: StepPlan
    step: StepInput
    started_ns: int
    micro_batch: int = 0  # tells the steps apart that are in flight together: 0 and 1 in turns with look-ahead, else 0
    dropped: set[SequenceId] = field(default_factory=set)  # have left the batch since: their results are ignored
    num_decoded_tokens: int | None = None  # tokens of generation rows once the step has landed; None: one for each row

    @property
    def sequences(self) -> list[Sequence]:
        return [seq for seq, _ in self.plan.rows if seq.seq_id not in self.dropped]

    @property
    def has_work(self) -> bool:
        """True if the workers have anything to do for it."""
        return bool(self.step.rows or self.step.new_rows or self.step.swap_out)


class StepsInFlight:
    """The steps that were submitted and not collected, oldest first: at most two with look-ahead, else one.

    one step at a time      schedule 1, submit 1, collect 1, update 1      schedule 2, submit 2, collect 2, update 2
    looking ahead           schedule 1, submit 1      schedule 2, submit 2, collect 1, update 1      schedule 3, submit 3, ...

    With look-ahead the host works while the device computes. The end of a sequence is then known one step late: its row in the
    step in flight is dropped when that step lands. A plan that depends on the result of a step in flight (StepPlan.must_wait) is
    discarded, and made again after the step has landed.
    """

    def __init__(self, workers: WorkerGroup, looks_ahead: bool) -> None:
        self._workers = workers
        self._looks_ahead = looks_ahead
        self._flights: deque[StepInFlight] = deque()
        self.next_step_id = 0

    def __len__(self) -> int:
        return len(self._flights)

    def advance(self, flight: StepInFlight | None) -> tuple[StepInFlight, StepOutput] | None:
        """Submit a step, if there is one, and wait for the oldest step.

        Returns None if no step is in flight, or only the submitted one while looking ahead.

        Raises any exception of the workers, and RuntimeError for results of another step; then all steps are lost.
        """
        if flight is not None:
            flight.micro_batch = flight.step.step_id % 2 if self._looks_ahead else 0
            self.skip()
            self._flights.append(flight)
            self._workers.submit(flight.step)
        if len(self._flights) <= (self._looks_ahead and flight is not None):
            return None
        output = self._workers.collect()
        check_samples(self._flights[0].step, output)
        return self._flights.popleft(), output

    def skip(self) -> None:
        """Skip the number of a step that is not submitted."""
        self.next_step_id += 1

    def drop(self, seq_id: SequenceId) -> None:
        """Ignore the rows in flight of a sequence that has left the batch."""
        for flight in self._flights:
            flight.dropped.add(seq_id)

    def lose(self) -> list[StepInFlight]:
        """Remove and return all steps in flight, after a failure."""
        flights = list(self._flights)
        self._flights.clear()
        return flights


def check_samples(step: StepInput, output: StepOutput) -> None:
    """Raise RuntimeError unless the output has one sample for each row that samples, in row order."""
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
    """Figures of a landed step, from which statistics are made on demand."""

    iteration: int
    started_ns: int
    ended_ns: int
    num_completed: int
    num_generation: int
    num_context: int
    num_context_tokens: int
    num_empty_slots: int
    num_decoded_tokens: int
    micro_batch: int

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
            micro_batch_id=self.micro_batch,
        )
