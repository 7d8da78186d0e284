"""What must hold after every event, besides the answers."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from backend.core.sequence import Sequence, Status
from backend.engine.core import EngineCore
from backend.kvcache.block import DROPPED, BlockHandle
from backend.scheduler.capacity import max_cells

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation


def check_invariants(simulation: Simulation) -> None:
    simulation.core.check_integrity()
    if simulation.core.kv.level is not None:
        simulation.core.kv.level.check_integrity()
    check_flights(simulation)
    _check_order(simulation)
    _check_context_limits(simulation)
    _check_tables(simulation)
    _check_sessions(simulation)
    _check_eviction_order(simulation)
    _scramble_free_blocks(simulation)


def _check_order(simulation: Simulation) -> None:
    """Requests for one sequence run in order of arrival within their namespace, those of the background among themselves, the
    sequences of one request in their order. Who takes turns with whom is the business of scheduler/queue.py.
    """
    core, scheduler = simulation.core, simulation.setup.config.scheduler
    lines: dict[object, list[int]] = defaultdict(list)
    for seq in (*core.scheduler.running, *core.scheduler.waiting):
        if seq.seq_id not in simulation.level.was_held:
            whose = (seq.request.cache_salt, seq.request.is_background) if seq.group is None else seq.request_id
            lines[whose].append(seq.arrival)
    for whose, arrivals in lines.items():
        assert all(a < b for a, b in pairwise(arrivals)), f"order of arrival is lost in {whose!r}: {arrivals}"
    if scheduler.policy == "guaranteed_no_evict":
        paused = [seq for seq in (*core.scheduler.running, *core.scheduler.waiting) if seq.num_pauses]
        assert all(seq.request.is_background for seq in paused), "a sequence was paused under GUARANTEED_NO_EVICT"
    assert len({seq.beam_width for seq in core.scheduler.running}) <= 1, "beam widths are mixed"
    if scheduler.batching == "separate":
        latest = core.latest_iteration()
        assert not (latest.num_context_requests and latest.num_gen_requests), f"context beside generation: {latest}"


def check_flights(simulation: Simulation) -> None:
    """Only what runs has something in flight, and nothing goes beyond its longest end; true of a step just committed, too."""
    scheduler = simulation.core.scheduler
    for seq in scheduler.waiting:
        assert not seq.num_inflight_tokens + seq.num_inflight_samples, f"{seq!r} waits with something in flight"
    for seq in scheduler.running:
        cells, most = seq.num_computed_tokens + seq.num_inflight_tokens, max_cells(seq)
        assert cells <= most, f"{seq!r} is to have KV of {cells} tokens, its longest end needs {most}"


def _check_context_limits(simulation: Simulation) -> None:
    """Context tokens of a step stay within their own limits, so that those who generate are not held up."""
    latest, scheduler = simulation.core.latest_iteration(), simulation.setup.config.scheduler
    if not scheduler.enable_chunked_context:
        return
    most = scheduler.max_context_tokens or scheduler.max_num_tokens
    if latest.num_gen_requests and scheduler.mixed_context_tokens:
        most = min(most, scheduler.mixed_context_tokens * (scheduler.max_batch_size - latest.num_gen_requests))
    if latest.num_gen_requests and scheduler.max_mixed_context_tokens:
        most = min(most, scheduler.max_mixed_context_tokens)
    assert latest.num_ctx_tokens <= most, f"more than {most} context tokens: {latest}"


def _check_tables(simulation: Simulation) -> None:
    """Tables belong to sequences that may run again; only running ones hold blocks; no block has two namespaces."""
    core = simulation.core
    running = {seq.seq_id: seq for seq in core.scheduler.running}
    waiting = {seq.seq_id: seq for seq in core.scheduler.waiting}
    idle = {seq.seq_id: seq for seq in core.sessions._sessions.values() if seq.status is Status.IDLE}
    known = {**running, **waiting, **idle}
    assert set(core.kv.state.tables) <= set(known), "a table of a sequence that is gone"
    namespaces: dict[BlockHandle, str] = {}
    owners: Counter[BlockHandle] = Counter()
    for seq_id, record in core.kv.state.tables.items():
        assert record.is_locked == (seq_id in running), f"{known[seq_id]!r}: locked {record.is_locked}"
        for handle in record.handles:
            if handle is not DROPPED and core.kv.state.blocks.verify([handle]):
                owners[handle] += 1
                namespace = namespaces.setdefault(handle, known[seq_id].namespace)
                assert namespace == known[seq_id].namespace, f"{handle} is seen by two namespaces"
    for seq in running.values():
        if seq.beam_width > 1:
            continue  # what beams share is copied by the plan that is to write on it
        block, offset = divmod(seq.num_computed_tokens, core.kv.block_size)
        if offset:
            handle = core.kv.state.tables[seq.seq_id].handles[block]
            num_heirs = sum(_is_heir(core, other, seq, handle) for other in waiting.values())
            assert owners[handle] == 1 + num_heirs, f"{seq!r} writes next to a block of others"


def _is_heir(core: EngineCore, other: Sequence, seq: Sequence, handle: BlockHandle) -> bool:
    """Whether `other` waits for its first admission and has only the prompt in a block that `seq` of its request writes on."""
    record = core.kv.state.tables.get(other.seq_id)
    if record is None or other.group is not seq.group or other.first_scheduled_ns:
        return False
    return handle in record.handles and other.num_computed_tokens <= seq.num_computed_tokens


def _check_sessions(simulation: Simulation) -> None:
    actual = {
        key: list(seq.token_ids) for key, seq in simulation.core.sessions._sessions.items() if seq.status is Status.IDLE
    }
    expected = {key: session.log for key, session in simulation.model.sessions.items() if session.turn is None}
    assert actual == expected, f"sessions remember {actual}, expected {expected}"
    for seq in simulation.core.sessions._sessions.values():
        if seq.status is Status.IDLE and seq.num_computed_tokens:
            record = simulation.core.kv.state.tables.get(seq.seq_id)
            covered = len(record.handles) * simulation.model.block_size if record else 0
            assert covered >= seq.num_computed_tokens, (
                f"the table of idle {seq!r} covers {covered} tokens: its KV cannot be found"
            )


def _check_eviction_order(simulation: Simulation) -> None:
    """Eviction shortens a table from its tail. Seen where blocks are not shared: others would touch the shared ones."""
    kv = simulation.core.kv
    shared = {seq.seq_id for seq in simulation.core.scheduler.waiting if seq.group is not None}
    for seq_id, record in kv.state.tables.items() if not kv.state.enable_block_reuse else ():
        if seq_id in shared:
            continue
        handles = [handle for handle in record.handles if handle is not DROPPED]
        survived = [kv.state.blocks.verify([handle]) == 1 for handle in handles]
        assert survived == sorted(survived, reverse=True), f"a table has lost its head before its tail: {survived}"


def _scramble_free_blocks(simulation: Simulation) -> None:
    """What is free may be overwritten at any time; do it now, so that whoever reads it is found out at once."""
    for block in simulation.core.kv.state.blocks.blocks:
        if not block.unique_id:
            simulation.workers.scramble(block.block_id)
