"""Sessions of the engine before this one, from its log."""

from __future__ import annotations

import logging

from backend.api.request import Request, RequestId, SessionConfig
from backend.core.sequence import Event, Sequence
from backend.engine.core import EngineCore
from backend.engine.session_log import SessionLog, Turn, fingerprint_of

log = logging.getLogger("everbatch.engine")


def restore_sessions(core: EngineCore, files: tuple[int, int], checkpoint: str = "") -> None:
    """Restore the sessions that are in these files (engine/session_files.py), and keep the log there from now on.

    They are idle, and their KV is computed again when they return. `checkpoint`: a mark of the model's files; sessions of
    another checkpoint are not restored.
    """
    sessions, found = core.sessions, SessionLog(files, fingerprint_of(core.model, checkpoint))
    now_ns = core.clock.monotonic_ns()
    for turn, token_ids, num_history in found.restore():
        seq = _idle(core, turn, list(token_ids), num_history)
        sessions.put(turn.key, seq, now_ns - int(found.idle_s(turn) * 1e9))
    sessions.log = found
    found.begin(sessions.all())
    if len(sessions):
        log.info("%d sessions go on from the log", len(sessions))


def _idle(core: EngineCore, turn: Turn, token_ids: list[int], num_history: int) -> Sequence:
    request = Request([], 0, session=SessionConfig(turn.key.id), cache_salt=turn.namespace)
    seq = Sequence(core.intake.next_seq_id(), RequestId(0), request, 0, 0)
    seq.kv_origin, seq.namespace, seq.adapter, seq.turn = turn.origin, turn.origin.namespace, turn.adapter, turn.turn
    seq.token_ids, seq.num_history_tokens = token_ids, num_history
    seq.apply(Event.REST)
    seq.end_turn()
    seq.seed, seq.num_sampled_before = turn.seed, turn.num_sampled
    seq.random_state_before = turn.seed_before, turn.num_sampled_before
    return seq
