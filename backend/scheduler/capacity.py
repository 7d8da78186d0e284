"""CapacityScheduler: which sequences have room in the KV pool. It decides on a KVPlan and changes nothing else.

    GuaranteedNoEvict   a sequence is admitted only when all admitted ones could run to their longest end together; none is
                        ever paused
    StaticBatch         the same, and nobody is admitted while others run
    MaxUtilization      a sequence is admitted when its known tokens fit; when the pool runs dry, the youngest running
                        sequence is paused, and computed again when there is room

Priority is the order of acceptance, so the oldest sequence always makes progress and no set of sequences can starve each
other by taking turns at recomputation. After TensorRT-LLM's capacity schedulers of the same names.
"""

from __future__ import annotations

from typing import Protocol

from backend.core.sequence import Sequence
from backend.core.step import SequenceId
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.plan import Admission, KVPlan


def max_cells(seq: Sequence) -> int:
    """KV positions at the longest end; the last sampled token's KV is never needed."""
    return seq.num_prompt_tokens + max(0, seq.max_output_tokens - 1)


def watermark(kv: KVCacheManager, running: list[Sequence], admitted: list[Sequence]) -> int:
    """Blocks that an admission beside others leaves free. A sequence alone needs none: there is nobody to make room for."""
    return kv.watermark_blocks if running or admitted else 0


class CapacityScheduler(Protocol):
    def admit(self, plan: KVPlan, seq: Sequence, running: list[Sequence], admitted: list[Sequence]) -> Admission:
        """Plan the admission of the first sequence in line, beside those that run and those admitted in this plan."""
        ...


class GuaranteedNoEvict:
    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def admit(self, plan: KVPlan, seq: Sequence, running: list[Sequence], admitted: list[Sequence]) -> Admission:
        promised = sum(self._growth(plan, other) for other in (*running, *admitted)) if plan.free_slots else 0
        return plan.admit(seq, max_cells(seq), promised + watermark(self._kv, running, admitted))

    def _growth(self, plan: KVPlan, seq: Sequence) -> int:
        """Blocks promised to a sequence that it does not hold yet, not even by this plan."""
        grant = plan.grants.get(seq.seq_id)
        if grant is not None and grant.admitted:
            return max(0, self._kv.blocks_needed(max_cells(seq)) - grant.num_held)
        return max(0, self._kv.num_growth_blocks(seq, max_cells(seq)) - (grant.num_new if grant else 0))


class StaticBatch(GuaranteedNoEvict):
    def admit(self, plan: KVPlan, seq: Sequence, running: list[Sequence], admitted: list[Sequence]) -> Admission:
        return Admission.LATER if running else super().admit(plan, seq, running, admitted)


class MaxUtilization:
    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def admit(self, plan: KVPlan, seq: Sequence, running: list[Sequence], admitted: list[Sequence]) -> Admission:
        # A block's worth of room to generate, so that a readmitted sequence does not leave again at once.
        needed = min(seq.num_tokens + self._kv.block_size, max_cells(seq))
        if self._kv.blocks_needed(max_cells(seq)) > self._kv.usable_blocks:
            return Admission.NEVER
        return plan.admit(seq, max(needed, seq.num_tokens), watermark(self._kv, running, admitted))


def extend_or_pause(plan: KVPlan, running: list[Sequence], num_tokens: dict[SequenceId, int]) -> list[Sequence]:
    """Plan KV for `num_tokens[seq_id]` more positions of each running sequence (none: it needs none), oldest first.

    While there is no room, the youngest is paused, at last the sequence itself. Returns those that keep running.
    """
    kept = list(running)
    index = 0
    while index < len(kept):
        seq = kept[index]
        more = num_tokens.get(seq.seq_id, 0)
        if not more or plan.extend(seq, seq.num_computed_tokens + seq.num_inflight_tokens + more):
            index += 1
        else:
            plan.pause(kept.pop())
    return kept
