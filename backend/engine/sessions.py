"""SessionTable: sequences that outlive their requests, by their keys. Bounded in number, age and memory.

A session between turns is its token ids; what KV of it is still cached is the KVCacheManager's business. The rules are those of
LMDeploy TurboMind's sequence manager (docs/features.md, 004): START creates or replaces, `step` rewinds, END erases. A session
belongs to the namespace of the client that began it: the same number in another namespace is another session.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable

from backend.api.config import SessionsConfig
from backend.api.errors import SessionError, SessionStatus
from backend.api.request import Request
from backend.core.sequence import Event, Sequence, SessionKey, Status
from backend.kvcache.manager import KVCacheManager

BYTES_PER_TOKEN = 8  # 4 of the token id, as many of the block table's share
BYTES_PER_SESSION = 2048  # everything else


class SessionTable:
    def __init__(self, config: SessionsConfig, erase: Callable[[Sequence], None]) -> None:
        """`erase` is called with each idle session that leaves the table, to release its blocks."""
        self._config = config
        self._erase = erase
        self._sessions: OrderedDict[SessionKey, Sequence] = OrderedDict()  # least recently used first
        self._last_used_ns: dict[SessionKey, int] = {}
        self._bytes: dict[SessionKey, int] = {}  # of those between turns
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._sessions

    def get(self, key: SessionKey) -> Sequence | None:
        return self._sessions.get(key)

    @property
    def num_bytes(self) -> int:
        """Memory that the sessions between turns are taken to use."""
        return self._num_bytes

    def check_turn(self, request: Request) -> Sequence | None:
        """Return the session that a turn continues, None for one that starts afresh. Raises SessionError, changes nothing."""
        session = request.session
        assert session is not None  # only the turns of sessions are checked
        known = self._sessions.get(SessionKey(request.cache_salt, session.id))
        if known is not None and known.status is not Status.IDLE:
            raise SessionError(
                SessionStatus.BUSY, f"session {session.id} is running a turn; wait for its end or stop it"
            )
        if known is None and not session.start:
            raise SessionError(SessionStatus.INVALID, f"session {session.id} is not known; begin it with START")
        return None if session.start else known

    def check_stop(self, key: SessionKey, end: bool) -> Sequence:
        """Return the session that is to be stopped. Raises SessionError when there is nothing to stop or to erase (`end`)."""
        seq = self._sessions.get(key)
        if seq is None:
            raise SessionError(SessionStatus.INVALID, f"session {key.id} is not known; there is nothing to stop")
        if seq.status is Status.IDLE and not end:
            raise SessionError(SessionStatus.INACTIVE, f"session {key.id} runs no turn; there is nothing to stop")
        return seq

    def put(self, key: SessionKey, seq: Sequence, now_ns: int) -> None:
        """Enter a new session; one of the same key that is idle is erased (START resets)."""
        self.erase(key)
        self._sessions[key] = seq
        self.touch(key, now_ns)

    def touch(self, key: SessionKey, now_ns: int) -> None:
        """Mark as most recently used; erase the least recently used idle ones beyond `max_sessions` and `max_bytes`."""
        self._sessions.move_to_end(key)
        self._last_used_ns[key] = now_ns
        self._weigh(key)
        while self._holds_too_much() and (oldest := self._oldest_idle(key)) is not None:
            self.erase(oldest)

    def erase(self, key: SessionKey) -> None:
        """Forget a session that is idle. Unknown keys are ignored."""
        seq = self._sessions.pop(key, None)
        self._last_used_ns.pop(key, None)
        self._num_bytes -= self._bytes.pop(key, 0)
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
        """The turn of a sequence is over: cut its log and KV where asked, note its use. Who has ended leaves the table.

        A turn that failed, or ended before its first admission, is undone: the client may send it again. Does nothing for a
        sequence of no session.
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
        self.touch(seq.session_key, now_ns)

    def expire(self, now_ns: int) -> None:
        """Erase idle sessions that nobody has used for `idle_ttl_s`."""
        if not self._sessions:
            return
        limit_ns = now_ns - int(self._config.idle_ttl_s * 1e9)
        old = itertools.takewhile(lambda key: self._last_used_ns[key] <= limit_ns, self._sessions)
        for key in [key for key in old if self._sessions[key].status is Status.IDLE]:
            self.erase(key)

    def _weigh(self, key: SessionKey) -> None:
        """Book the memory of a session: none while it runs a turn, which the limits of requests bound."""
        seq = self._sessions[key]
        num_bytes = BYTES_PER_SESSION + BYTES_PER_TOKEN * seq.num_tokens if seq.status is Status.IDLE else 0
        self._num_bytes += num_bytes - self._bytes.get(key, 0)
        self._bytes[key] = num_bytes

    def _holds_too_much(self) -> bool:
        return len(self._sessions) > self._config.max_sessions or self._num_bytes > self._config.max_bytes

    def _oldest_idle(self, spare: SessionKey) -> SessionKey | None:
        idle = (key for key, seq in self._sessions.items() if seq.status is Status.IDLE and key != spare)
        return next(idle, None)


def stays(seq: Sequence) -> bool:
    """Whether a sequence outlives its request, as one of a session that goes on."""
    session = seq.request.session
    return session is not None and not (session.end or seq.erase_when_finished)
