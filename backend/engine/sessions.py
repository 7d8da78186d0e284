"""SessionTable: sequences that outlive their requests, by their keys. Bounded in number, age and memory.

Between turns a session consists of its token ids; the KVCacheManager knows which of its KV is still cached. The rules are
those of LMDeploy TurboMind's sequence manager (docs/features.md, 004): START creates or replaces, `step` rewinds, END erases.
A session belongs to the namespace of its client: the same number in another namespace is another session.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator

from backend.api.config.schema import SessionsConfig
from backend.api.errors import SessionError, SessionStatus
from backend.api.request import Request
from backend.core.sequence import Event, Sequence, SessionKey, Status
from backend.engine.session_log import SessionLog
from backend.kvcache.manager import KVCacheManager

log = logging.getLogger("everbatch.engine")

# Memory that an idle session takes besides the KV pool, as tests/model/test_session_memory.py measures it.
BYTES_PER_TOKEN = 4  # the token id
BYTES_PER_BLOCK = 112  # an entry of the block table, also of a block whose KV was evicted
BYTES_PER_SESSION = 3392  # everything else, with what the allocator adds


def idle_bytes(num_tokens: int, block_size: int) -> int:
    """An estimate of the memory of an idle session with so many tokens."""
    return BYTES_PER_SESSION + BYTES_PER_TOKEN * num_tokens + BYTES_PER_BLOCK * -(-num_tokens // block_size)


class SessionTable:
    def __init__(self, config: SessionsConfig, block_size: int, erase: Callable[[Sequence], None]) -> None:
        """`block_size`: tokens of a KV block. `erase` is called with each idle session that leaves, to release its blocks."""
        self._config = config
        self._block_size = block_size
        self._erase = erase
        self._sessions: OrderedDict[SessionKey, Sequence] = OrderedDict()  # least recently used first
        self._last_used_ns: dict[SessionKey, int] = {}
        self._bytes: dict[SessionKey, int] = {}  # memory of each idle session
        self._num_bytes = 0
        self.log: SessionLog | None = None  # set by engine/restoring.py, where sessions outlive the engine process

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._sessions

    def get(self, key: SessionKey) -> Sequence | None:
        return self._sessions.get(key)

    @property
    def num_bytes(self) -> int:
        """An estimate of the memory of all idle sessions."""
        return self._num_bytes

    def check_turn(self, request: Request) -> Sequence | None:
        """Return the session that a turn continues; None if it starts a new one. Raises SessionError. Changes nothing."""
        session = request.session
        assert session is not None  # called for turns of sessions only
        known = self._sessions.get(SessionKey(request.cache_salt, session.id))
        if known is not None and known.status is not Status.IDLE:
            raise SessionError(
                SessionStatus.BUSY, f"session {session.id} is running a turn; wait for its end or stop it"
            )
        if known is None and not session.start:
            raise SessionError(SessionStatus.INVALID, f"session {session.id} is not known; begin it with START")
        return None if session.start else known

    def check_stop(self, key: SessionKey, end: bool) -> Sequence:
        """Return the session to stop. Raises SessionError if there is no running turn, or with `end` no session."""
        seq = self._sessions.get(key)
        if seq is None:
            raise SessionError(SessionStatus.INVALID, f"session {key.id} is not known; there is nothing to stop")
        if seq.status is Status.IDLE and not end:
            raise SessionError(SessionStatus.INACTIVE, f"session {key.id} runs no turn; there is nothing to stop")
        return seq

    def put(self, key: SessionKey, seq: Sequence, now_ns: int) -> None:
        """Add a new session. An idle one with the same key is erased (START replaces it)."""
        self.erase(key)
        self._sessions[key] = seq
        self.touch(key, now_ns)

    def all(self) -> Iterator[Sequence]:
        """The least recently used first."""
        return iter(self._sessions.values())

    def newest(self) -> Iterator[Sequence]:
        """The most recently used first."""
        return reversed(self._sessions.values())

    def touch(self, key: SessionKey, now_ns: int) -> None:
        """Mark a session as most recently used, and erase the least recently used idle ones beyond the bounds."""
        self._sessions.move_to_end(key)
        self._last_used_ns[key] = now_ns
        self._weigh(key)
        while self._holds_too_much() and (oldest := self._oldest_idle(key)) is not None:
            self.erase(oldest)

    def erase(self, key: SessionKey) -> None:
        """Remove an idle session. Unknown keys are ignored."""
        seq = self._sessions.pop(key, None)
        self._last_used_ns.pop(key, None)
        self._num_bytes -= self._bytes.pop(key, 0)
        if seq is not None and self.log is not None:
            self.log.forget(key)
        if seq is not None and seq.status is Status.IDLE:
            seq.apply(Event.RETIRE)
            self._erase(seq)

    def settle(
        self,
        seq: Sequence,
        kv: KVCacheManager,
        now_ns: int,
        keep_output_tokens: int | None = None,
        undo: bool = False,
    ) -> None:
        """End the turn of a session: truncate its log and KV if asked, and note its use; a session that was ENDed is removed.

        A turn that failed, or ended before its first admission, is undone, so that the client may send it again. Does nothing
        for a sequence without a session.
        """
        if seq.session_key is None:
            return
        if seq.status is Status.RETIRED:
            self.erase(seq.session_key)
            return
        if undo or not seq.first_scheduled_ns:
            kv.truncate(seq, seq.num_history_tokens)
            seq.undo_turn()
        elif keep_output_tokens is not None and keep_output_tokens < seq.num_output_tokens:
            keep = seq.num_prompt_tokens + keep_output_tokens
            kv.truncate(seq, keep)
            seq.truncate(keep)
        seq.end_turn()
        if self.log is not None:
            self.log.note(seq)
        self.touch(seq.session_key, now_ns)

    def undo(self, seq: Sequence, kv: KVCacheManager) -> None:
        """Take an idle session back to before its latest turn, which is about to be run again for a client that lost its end."""
        kv.truncate(seq, seq.num_history_tokens)
        seq.undo_turn()

    def flush(self) -> None:
        """Write the turns that have ended into the log. Called ahead of their final responses."""
        if self.log is not None:
            self.log.flush(self.all)

    def close(self) -> None:
        """The engine ends in good order."""
        if self.log is not None:
            self.log.close(self.all)

    def expire(self, now_ns: int) -> None:
        """Erase sessions that have been idle for `idle_ttl_s`."""
        if not self._sessions:
            return
        limit_ns = now_ns - int(self._config.idle_ttl_s * 1e9)
        old = itertools.takewhile(lambda key: self._last_used_ns[key] <= limit_ns, self._sessions)
        for key in [key for key in old if self._sessions[key].status is Status.IDLE]:
            self.erase(key)

    def _weigh(self, key: SessionKey) -> None:
        """Count the memory of a session while it is idle. During a turn the limits of requests bound it."""
        seq = self._sessions[key]
        num_bytes = idle_bytes(seq.num_tokens, self._block_size) if seq.status is Status.IDLE else 0
        self._num_bytes += num_bytes - self._bytes.get(key, 0)
        self._bytes[key] = num_bytes

    def _holds_too_much(self) -> bool:
        return len(self._sessions) > self._config.max_sessions or self._num_bytes > self._config.max_bytes

    def _oldest_idle(self, spare: SessionKey) -> SessionKey | None:
        idle = (key for key, seq in self._sessions.items() if seq.status is Status.IDLE and key != spare)
        return next(idle, None)


def stays(seq: Sequence) -> bool:
    """True if a sequence outlives its request, because its session goes on."""
    session = seq.request.session
    return session is not None and not (session.end or seq.erase_when_finished)


def tell_if_cut(request: Request, num_tokens: int, max_output: int) -> None:
    """Warn of an output that the session's length cuts, as TurboMind does. `num_tokens`: history and prompt."""
    session = request.session
    if session is None or session.session_len != num_tokens + max_output or max_output >= request.max_tokens:
        return
    log.warning(
        "session %d: %d tokens of history and prompt and %d of output exceed its session_len; the output is cut to %d tokens",
        *(session.id, num_tokens, request.max_tokens, max_output),
    )
