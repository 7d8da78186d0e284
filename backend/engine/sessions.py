"""SessionTable: sequences that outlive their requests, by session id. Bounded in number and age.

A session between turns is its token ids; what KV of it is still cached is the KVCacheManager's business. After LMDeploy
TurboMind's sequence manager (document 004): START creates or replaces, `step` rewinds, END erases.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable

from backend.api.config import SessionsConfig
from backend.api.errors import SessionError, SessionStatus
from backend.api.request import Request, SessionId
from backend.core.sequence import Event, Sequence, Status


class SessionTable:
    def __init__(self, config: SessionsConfig, erase: Callable[[Sequence], None]):
        """`erase` is called with each idle session that leaves the table, to release its blocks."""
        self._config = config
        self._erase = erase
        self._sessions: OrderedDict[SessionId, Sequence] = OrderedDict()  # least recently used first
        self._last_used_ns: dict[SessionId, int] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: SessionId) -> bool:
        return session_id in self._sessions

    def get(self, session_id: SessionId) -> Sequence | None:
        return self._sessions.get(session_id)

    def check_turn(self, request: Request) -> Sequence | None:
        """Return the session that a turn continues, None for one that starts afresh. Raises SessionError, changes nothing."""
        session = request.session
        known = self._sessions.get(session.id)
        if known is not None and known.status is not Status.IDLE:
            raise SessionError(
                SessionStatus.BUSY, f"session {session.id} is running a turn; wait for its end or stop it"
            )
        if known is None and not session.start:
            raise SessionError(SessionStatus.INVALID, f"session {session.id} is not known; begin it with START")
        return None if session.start else known

    def put(self, session_id: SessionId, seq: Sequence, now_ns: int) -> None:
        """Enter a new session; one of the same id that is idle is erased (START resets)."""
        self.erase(session_id)
        self._sessions[session_id] = seq
        self.touch(session_id, now_ns)

    def touch(self, session_id: SessionId, now_ns: int) -> None:
        """Mark as most recently used; erase the least recently used idle ones beyond `max_sessions`."""
        self._sessions.move_to_end(session_id)
        self._last_used_ns[session_id] = now_ns
        excess = len(self._sessions) - self._config.max_sessions
        if excess > 0:
            idle = (key for key, seq in self._sessions.items() if seq.status is Status.IDLE and key != session_id)
            for key in list(itertools.islice(idle, excess)):
                self.erase(key)

    def erase(self, session_id: SessionId) -> None:
        """Forget a session that is idle. Unknown ids are ignored."""
        seq = self._sessions.pop(session_id, None)
        self._last_used_ns.pop(session_id, None)
        if seq is not None and seq.status is Status.IDLE:
            seq.apply(Event.RETIRE)
            self._erase(seq)

    def expire(self, now_ns: int) -> None:
        """Erase idle sessions that nobody has used for `idle_ttl_s`."""
        if not self._sessions:
            return
        limit_ns = now_ns - int(self._config.idle_ttl_s * 1e9)
        old = itertools.takewhile(lambda session_id: self._last_used_ns[session_id] <= limit_ns, self._sessions)
        for session_id in [key for key in old if self._sessions[key].status is Status.IDLE]:
            self.erase(session_id)
