"""Placement: which replica a request runs on. Pure.

A turn of a session runs where the session is. Any other request runs where the fewest tokens have to be computed before its
first one: tokens of its prompt that this replica has not seen, prompts that wait there already, and a share of each step for
requests that generate there. So a conversation stays on its replica while that is not much busier than others, as in the
cache-aware routers of SGLang and smg.

What a replica has seen is an estimate: prompts that were sent there, in pieces of PIECE tokens, the least recently used ones
forgotten first. It only steers; every replica computes what it does not find in its own KV cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from msgspec import Struct

from backend.api.request import Request, SessionId

PIECE = 32  # tokens; a default KV block
MAX_PIECES = 1 << 18  # 8 million tokens of prompts, in about 30 MB
MAX_SESSIONS = 1 << 20
# A request that generates adds a row to each step. While a prompt of a thousand tokens is computed in some ten steps, such a row
# costs about as much as this many tokens of the prompt.
TOKENS_PER_STREAM = 32

Key = tuple[str, SessionId]  # a client's namespace and its number of the session


class ReplicaLoad(Struct):
    """The work that a replica has been given and not finished."""

    waiting_tokens: int = 0  # tokens to compute of prompts without a first token yet
    num_live: int = 0  # requests

    @property
    def tokens(self) -> int:
        return self.waiting_tokens + TOKENS_PER_STREAM * self.num_live


class ReplicaPlace(Struct, frozen=True):
    replica: int
    num_new_tokens: int  # prompt tokens that are not known to be in the replica's KV cache


class Placement:
    def __init__(self, max_pieces: int = MAX_PIECES, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_pieces = max_pieces
        self._max_sessions = max_sessions
        self._seen: OrderedDict[int, int] = (
            OrderedDict()
        )  # hash of a prompt's beginning -> bit i: replica i has seen it
        self._sessions: OrderedDict[Key, int] = OrderedDict()  # least recently used first

    def place(self, request: Request, ready: Sequence[int], loads: Sequence[ReplicaLoad]) -> ReplicaPlace:
        """Choose one of the `ready` replicas, and remember the choice. `loads`: of all replicas, by their numbers.

        A turn of a session that no ready replica holds goes to another one, which refuses it unless it starts the session.
        """
        pieces = list(_pieces(request))
        known = self._known(pieces, ready)
        num_tokens = len(request.input_token_ids)
        new = {each: max(1, num_tokens - PIECE * known[each]) for each in ready}
        chosen = min(ready, key=lambda each: (new[each] + loads[each].tokens, each))
        if request.session is not None:
            chosen = self._of_session((request.cache_salt, request.session.id), chosen, ready)
        self._remember(pieces, chosen)
        return ReplicaPlace(chosen, new[chosen])

    def holder(self, namespace: str, session: SessionId) -> int | None:
        """The replica that holds a session; None if it is not known."""
        return self._sessions.get((namespace, session))

    def end(self, namespace: str, session: SessionId) -> None:
        """A session has been erased."""
        self._sessions.pop((namespace, session), None)

    def forget(self, replica: int) -> None:
        """A replica has started again: its KV cache is empty. Its sessions are there again (engine/session_log.py)."""
        others = ~(1 << replica)
        kept = [(piece, mask & others) for piece, mask in self._seen.items()]
        self._seen = OrderedDict((piece, mask) for piece, mask in kept if mask)

    def _known(self, pieces: list[int], ready: Sequence[int]) -> dict[int, int]:
        """How many pieces at the beginning of the prompt each ready replica has seen."""
        known = dict.fromkeys(ready, 0)
        still = sum(1 << each for each in ready)
        for piece in pieces:
            still &= self._seen.get(piece, 0)
            if not still:
                break
            for each in ready:
                known[each] += still >> each & 1
        return known

    def _of_session(self, key: Key, otherwise: int, ready: Sequence[int]) -> int:
        at = self._sessions.pop(key, otherwise)
        chosen = self._sessions[key] = at if at in ready else otherwise
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return chosen

    def _remember(self, pieces: Iterable[int], replica: int) -> None:
        for piece in pieces:
            self._seen[piece] = self._seen.pop(piece, 0) | 1 << replica
        while len(self._seen) > self._max_pieces:
            self._seen.popitem(last=False)


def _pieces(request: Request) -> Iterable[int]:
    """A hash of the prompt's first PIECE tokens, of its first 2 * PIECE, and so on, MAX_PIECES at most."""
    tokens = request.input_token_ids
    whole = len(tokens) - len(tokens) % PIECE
    so_far = hash(request.namespace)
    for start in islice(range(0, whole, PIECE), MAX_PIECES):
        so_far = hash((so_far, *tokens[start : start + PIECE]))
        yield so_far
