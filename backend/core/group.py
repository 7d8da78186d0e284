"""SequenceGroup: the live sequences of a request that has several. A request with one sequence has no group.

n sequences     each has its own output. The first member computes the prompt while the others wait in the queue. Then they
                get its block table (KVCacheManager.share), so that the prompt is computed once, and each copies the last
                block, which the prompt fills in part.
beams           the members are k rows for the hypotheses of one search; they are admitted, paused and retired together. The
                first computes the prompt, the others are dormant until they get a continuation of it.

A beam's row samples no token by itself: a step returns candidates for its next token. When every hypothesis has its candidates,
the search chooses among all of them (engine/beams.py). A hypothesis goes on in its own row, forks into the row of one that is
dropped, or ends and leaves the batch as a list of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.core.sequence import BeamSequence, Sequence


class SequenceGroup:
    __slots__ = ("beam_width", "has_prompt", "members", "most_output_tokens")

    def __init__(self, beam_width: int = 1) -> None:
        self.beam_width = beam_width
        self.members: list[Sequence] = []  # the sequences that have not ended, by sequence_index; written by EngineCore
        self.most_output_tokens = 0  # the longest output so far among ended members; written by engine.distributions
        self.has_prompt = False  # a member has computed the prompt, and the others know its blocks

    def holds_back(self, seq: Sequence) -> bool:
        """True if a member must wait because another one computes the prompt first."""
        return not self.has_prompt and seq is not self.members[0]


class BeamGroup(SequenceGroup):
    __slots__ = ("beams", "num_candidates")

    def __init__(self, beam_width: int, num_candidates: int) -> None:
        """`num_candidates`: for the next token of each row."""
        super().__init__(beam_width)
        self.num_candidates = num_candidates
        self.beams: list[BeamSequence] = []  # the members that hold hypotheses, best first

    def holds_back(self, seq: Sequence) -> bool:
        return False

    @property
    def is_ready(self) -> bool:
        """True if all hypotheses have their candidates."""
        return all(beam.candidates is not None for beam in self.beams)
