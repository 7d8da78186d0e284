"""Requests that return several sequences: their sequences, and what these do together."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping

from backend.api.request import RequestId
from backend.core.group import SequenceGroup
from backend.core.sequence import Sequence, Status
from backend.kvcache.manager import KVCacheManager
from backend.scheduler.scheduler import Scheduler


def stream_seed(seed: int, sequence_index: int) -> int:
    """The seed of a sequence's random stream (uint64): the request's for the first, derived from it for the others."""
    if sequence_index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, sequence_index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def make_sequences(make: Callable[[], Sequence], count: int) -> list[Sequence]:
    """Make the sequences of a request, in the order of their arrival. `make` makes one."""
    sequences = [make() for _ in range(count)]
    if count > 1:
        group = SequenceGroup()
        group.members = list(sequences)
        for index, seq in enumerate(sequences):
            seq.group, seq.sequence_index, seq.seed = group, index, stream_seed(seq.seed, index)
            if index and seq.gathered is not None:
                seq.gathered.leave_prompt_outputs()
    return sequences


def members(seq: Sequence, sequence_index: int | None = None) -> list[Sequence]:
    """The live sequences of the request of `seq`; with an index only the one with that index, if it is live."""
    live = [seq] if seq.group is None else list(seq.group.members)
    return [member for member in live if sequence_index in (None, member.sequence_index)]


def share_prompt(seq: Sequence, kv: KVCacheManager) -> None:
    """Once a member has computed the prompt, share its KV and context rows with the other sequences of the request."""
    group = seq.group
    if group is None or group.has_prompt or seq.num_computed_tokens < seq.num_prompt_tokens:
        return
    group.has_prompt = True
    waiting_siblings = [member for member in group.members if member is not seq]
    kv.share(seq, waiting_siblings)
    for sibling in waiting_siblings:
        if sibling.gathered is not None and seq.gathered is not None:
            sibling.gathered.inherit(seq.gathered)


def leave(seq: Sequence) -> Sequence | None:
    """Remove a sequence that has ended. Returns another live one of its request; None if it was the last."""
    group = seq.group
    if group is None:
        return None
    group.members.remove(seq)
    return group.members[0] if group.members else None


def has_waiting_siblings(seq: Sequence) -> bool:
    """True if waiting sequences of its request refer to its blocks."""
    group = seq.group
    return (
        group is not None
        and group.beam_width == 1
        and any(member.status is not Status.RUNNING for member in group.members)
    )


def check_integrity(scheduler: Scheduler, live: Mapping[RequestId, Sequence]) -> None:
    """Raise AssertionError unless exactly the live sequences are in the batch or in the queue, with matching states."""
    found: dict[RequestId, list[Sequence]] = {}
    for seq in (*scheduler.waiting, *scheduler.running):
        found.setdefault(seq.request_id, []).append(seq)
    assert set(found) == set(live), f"queued or running {sorted(found)} != live requests {sorted(live)}"
    for request_id, seq in live.items():
        alive = members(seq)
        assert {*found[request_id]} == {*alive}, f"{alive} are live, {found[request_id]} are queued or running"
    for seq in scheduler.running:
        assert seq.status is Status.RUNNING and seq.slot is not None, f"{seq!r} is in the batch"
    for seq in scheduler.waiting:
        assert seq.status in (Status.WAITING, Status.PAUSED) and seq.slot is None, f"{seq!r} is in the queue"
