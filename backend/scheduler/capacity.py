"""CapacityScheduler: decides which sequences fit into the KV pool. It works on a KVPlan and changes nothing else.

    GuaranteedNoEvict   a sequence is admitted only if all admitted sequences fit at their full length; none is ever paused
    StaticBatch         the same, and no sequence is admitted while others run
    MaxUtilization      a sequence is admitted if its known tokens fit; when the pool is exhausted, the youngest running
                        sequence is preempted (paused), and its evicted KV is recomputed when there is room again

Admitted sequences get blocks in the order of their admission, whatever the priority of their requests. So the oldest one always
makes progress, and sequences cannot preempt each other for ever.

After TensorRT-LLM's capacity schedulers of the same names.
"""

from __future__ import annotations

from typing import Protocol

from backend.core.sequence import Sequence
from backend.core.step import SequenceId
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.plan import Admission, KVPlan
from backend.kvcache.tables import Grant


def max_cells(seq: Sequence) -> int:
    """KV positions of the sequence at its full length. The KV of the last sampled token is never needed."""
    return seq.num_prompt_tokens + max(0, seq.max_output_tokens - 1)


def watermark(kv: KVCacheManager, running: list[Sequence], admitted: list[Sequence]) -> int:
    """Blocks that stay free when a sequence is admitted while others run; 0 for the first sequence."""
    return kv.watermark_blocks if running or admitted else 0


class CapacityScheduler(Protocol):
    def blocks_needed(self, num_prompt: int, max_output: int, beam_width: int) -> int:
        """The blocks that the pool must have to accept a request."""
        ...

    def admit(self, plan: KVPlan, seq: Sequence, running: list[Sequence], admitted: list[Sequence]) -> Admission:
        """Plan the admission of the first sequence in the queue, given those that run and those that this plan admits."""
        ...


class GuaranteedNoEvict:
    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def blocks_needed(self, num_prompt: int, max_output: int, beam_width: int) -> int:
        """The blocks of a request at its full length. Beams share the whole blocks of their prompt while they run."""
        cells = num_prompt + max(0, max_output - 1)
        needed = self._kv.blocks_needed(cells)
        return needed + (beam_width - 1) * (needed - self._shared(num_prompt))

    def admit(self, plan: KVPlan, seq: Sequence, running: list[Sequence], admitted: list[Sequence]) -> Admission:
        promised = sum(self._growth(plan, other) for other in (*running, *admitted)) if plan.free_slots else 0
        return plan.admit(seq, max_cells(seq), promised + watermark(self._kv, running, admitted))

    def _growth(self, plan: KVPlan, seq: Sequence) -> int:
        """Blocks that a sequence may still need beyond those that it holds or that this plan grants."""
        grant = plan.grants.get(seq.seq_id)
        if seq.beam_width > 1:
            return self._growth_of_beam(grant, seq)
        if grant is not None and grant.admitted:
            return max(0, self._kv.blocks_needed(max_cells(seq)) - grant.num_held)
        return max(0, self._kv.num_growth_blocks(seq, max_cells(seq)) - (grant.num_new if grant else 0))

    def _growth_of_beam(self, grant: Grant | None, seq: Sequence) -> int:
        """Blocks that a beam may still need. The first beam counts all of its blocks, the others those behind the whole
        blocks of the prompt.

        A block that another beam shares does not count as held, because it is copied before it is written.
        """
        shared, is_first = self._shared(seq.num_prompt_tokens), seq is seq.rows[0]
        needed = self._kv.blocks_needed(max_cells(seq)) - (0 if is_first else shared)
        if grant is not None and grant.admitted:
            return max(0, needed - grant.num_held)
        held = self._kv.num_private_blocks(seq, shared) + (self._kv.num_blocks_held(seq, shared) if is_first else 0)
        return max(0, needed - held - (grant.num_new if grant else 0))

    def _shared(self, num_prompt: int) -> int:
        return 0 if self._kv.geometry.window is not None else num_prompt // self._kv.block_size


class StaticBatch(GuaranteedNoEvict):
    def admit(self, plan: KVPlan, seq: Sequence, running: list[Sequence], admitted: list[Sequence]) -> Admission:
        return Admission.LATER if running else super().admit(plan, seq, running, admitted)


class MaxUtilization:
    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def blocks_needed(self, num_prompt: int, max_output: int, beam_width: int) -> int:
        """The blocks of a request at its full length. Beams that return from a pause may share no blocks."""
        return beam_width * self._kv.blocks_needed(num_prompt + max(0, max_output - 1))

    def admit(self, plan: KVPlan, seq: Sequence, running: list[Sequence], admitted: list[Sequence]) -> Admission:
        # One block beyond the known tokens, so that a readmitted sequence is not paused again at once.
        needed = min(seq.num_tokens + self._kv.block_size, max_cells(seq))
        if self._kv.blocks_needed(max_cells(seq)) > self._kv.usable_blocks:
            return Admission.NEVER
        return plan.admit(seq, max(needed, seq.num_tokens), watermark(self._kv, running, admitted))


def admit_beams(
    policy: CapacityScheduler, plan: KVPlan, beams: list[Sequence], running: list[Sequence], admitted: list[Sequence]
) -> Admission:
    """Plan the admission of all beams of a request, or of none. Dormant ones get only a slot."""
    if plan.free_slots < len(beams):
        return Admission.LATER
    mark = plan.mark()
    for seq in beams:
        others = [*admitted, *(other for other in beams if other is not seq)]
        answer = plan.reserve_slot(seq) if seq.is_dormant else policy.admit(plan, seq, running, others)
        if answer is not Admission.NOW:
            plan.rollback(mark)
            return answer
    return Admission.NOW


def extend_or_pause(plan: KVPlan, running: list[Sequence], num_tokens: dict[SequenceId, int]) -> list[Sequence]:
    """Plan KV for `num_tokens[seq_id]` more positions of each running sequence (no entry: none), oldest first.

    While there is no room, the youngest is paused, which may be the sequence that needs room. Returns those that keep running.
    """
    kept = list(running)
    index = 0
    while index < len(kept):
        seq = kept[index]
        more = num_tokens.get(seq.seq_id, 0)
        if not more or plan.extend(seq, seq.num_computed_tokens + seq.num_inflight_tokens + more):
            index += 1
        else:
            for victim in _pop_youngest(kept):
                plan.retract(victim)
                plan.pause(victim)
            index = min(index, len(kept))
    return kept


def _pop_youngest(kept: list[Sequence]) -> list[Sequence]:
    """Remove and return the youngest sequence, or all beams of the youngest request, youngest first."""
    victims = [kept.pop()]
    while victims[0].beam_width > 1 and kept and kept[-1].group is victims[0].group:
        victims.append(kept.pop())
    return victims
