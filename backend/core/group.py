"""SequenceGroup: the live sequences of one request that returns several. A request that returns one has no group.

The first member computes the prompt; the others are held back in the queue until it has. They are then given its block table
(KVCacheManager.share), so that the prompt is computed once, and copy the block that its end fills in part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.core.sequence import Sequence


class SequenceGroup:
    __slots__ = ("has_prompt", "members")

    def __init__(self) -> None:
        self.members: list[Sequence] = []  # those that have not ended, by sequence_index; written by EngineCore
        self.has_prompt = False  # a member has computed the prompt, and the others know its blocks

    def holds_back(self, seq: Sequence) -> bool:
        """Whether a member should wait, because another one is computing the prompt or will before it."""
        return not self.has_prompt and seq is not self.members[0]
