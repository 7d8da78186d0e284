"""StepPlan: what the next step runs, admits and pauses. The Scheduler makes it, and commits it once or drops it."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.core.sequence import Sequence
from backend.core.step import SequenceId
from backend.kvcache.plan import KVPlan
from backend.scheduler.drafting import Draft


@dataclass(slots=True)
class StepPlan:
    kv: KVPlan
    generation: list[Sequence] = field(default_factory=list)  # run one token each; the first rows of the flat batch
    context: list[tuple[Sequence, int]] = field(default_factory=list)  # the rows behind them, with their tokens to run
    admitted: list[Sequence] = field(default_factory=list)
    drafts: dict[SequenceId, Draft] = field(default_factory=dict)  # drafts of generation rows
    rejected: list[Sequence] = field(default_factory=list)  # sequences that can never fit
    no_room: list[Sequence] = field(default_factory=list)  # written by commit: paused, and the host lacks room for KV
    background_room: int | None = None  # tokens that background rows may have; None: any number
    is_blocked: bool = False  # True if somebody who is no background found no slot, block or adapter's place
    has_held: bool = False  # True if a sequence was passed over, because its KV comes from the second level
    num_cached_tokens: int = 0  # written by commit: tokens whose KV was found at the first admission of a turn
    num_queried_tokens: int = 0  # written by commit: tokens whose KV was looked for then
    num_evicted: int = 0  # written by commit: admitted sequences whose KV had been evicted
    num_lost_tokens: int = 0  # written by commit: tokens of new requests whose KV was cached once and has been evicted
    num_empty_slots: int = 0  # written by commit: rows of a static batch that have ended
    beam_width: int = 1  # the same in all rows
    changes_width: bool = False  # True if it differs from that of the step before

    @property
    def rows(self) -> list[tuple[Sequence, int]]:
        """(sequence, tokens to run), in flat-batch order."""
        return [*((seq, 1) for seq in self.generation), *self.context]

    @property
    def paused(self) -> list[Sequence]:
        return self.kv.pauses

    @property
    def is_empty(self) -> bool:
        return not (self.generation or self.context or self.paused or self.rejected)

    @property
    def must_wait(self) -> bool:
        """True if steps in flight must land before this one starts.

        A pause would discard what they compute, and steps of different beam widths are never in flight together.
        """
        return bool(self.paused) or self.changes_width
