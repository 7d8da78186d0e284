"""SequenceGroup: the live sequences of one request that has several. A request that has one has no group.

n sequences     each has its own output. The first member computes the prompt; the others are held back in the queue until it
                has. They are then given its block table (KVCacheManager.share), so that the prompt is computed once, and copy
                the block that its end fills in part.
beams           the members are k rows for the hypotheses of one search, and are admitted, paused and ended together. The first
                computes the prompt, the others lie dormant until they are given one of its continuations.

A beam's row samples nothing by itself: what a step tells of it are the candidates for its next token. When every hypothesis has
its candidates, the search chooses among all of them (engine/beams.py): hypotheses go on, in the row of the one that they
continue or in that of one that is given up, or end, and leave the batch as a list of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.core.sequence import BeamSequence, Sequence


class SequenceGroup:
    __slots__ = ("beam_width", "has_prompt", "members")

    def __init__(self, beam_width: int = 1) -> None:
        self.beam_width = beam_width
        self.members: list[Sequence] = []  # those that have not ended, by sequence_index; written by EngineCore
        self.has_prompt = False  # a member has computed the prompt, and the others know its blocks

    def holds_back(self, seq: Sequence) -> bool:
        """Whether a member should wait, because another one is computing the prompt or will before it."""
        return not self.has_prompt and seq is not self.members[0]


class BeamGroup(SequenceGroup):
    __slots__ = ("beams", "num_candidates")

    def __init__(self, beam_width: int, num_candidates: int) -> None:
        """`num_candidates`: that the search needs of each row."""
        super().__init__(beam_width)
        self.num_candidates = num_candidates
        self.beams: list[BeamSequence] = []  # the members that hold hypotheses, the best first

    def holds_back(self, seq: Sequence) -> bool:
        return False

    @property
    def is_ready(self) -> bool:
        """Whether the candidates of all hypotheses are there."""
        return all(beam.candidates is not None for beam in self.beams)
