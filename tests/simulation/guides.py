"""Guides of random schedules: what their grammars allow, and a compiler that is as slow and as forgetful as one may be.

A guide is an automaton over token ids whose state is a hash of the guide's text and of all tokens of the output so far: whoever
loses one token of the output, or takes one of the prompt for output, allows other tokens from there on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from backend.api.errors import Overloaded
from backend.api.guide import Guide
from backend.api.request import Request, RequestId
from backend.core.step import OnCompiled
from backend.engine.beams import FORBIDDEN
from tests.fakes.hash_worker import mix, next_token
from tests.simulation.setups import VOCAB

EOS_IDS = (VOCAB - 1, VOCAB - 2)  # of the model, for requests with guides that name none
MAX_COMPILING = 3
CANDIDATES = 128  # tokens that come before others, however many are asked for
MayFollow = Callable[[int], bool]  # whether a token may follow
_TOKENS = np.arange(VOCAB, dtype=np.uint64)


def first_state(guide: Guide) -> int:
    """Of the guide `empty` one in which the output must end."""
    return 0 if guide.text == "empty" else mix(*guide.text.encode())


def next_state(state: int, token_id: int) -> int:
    return mix(state, token_id)


def is_complete(state: int) -> bool:
    """Whether the output may end here."""
    return state % 4 == 0


def is_closed(state: int) -> bool:
    """Whether it must."""
    return state % 36 == 0


def allows(state: int, token_id: int) -> bool:
    """Whether a token that ends nothing may follow: two of three."""
    return not is_closed(state) and (31 * token_id + state % 1009) % 3 > 0


def ends_of(request: Request) -> tuple[int, ...]:
    return request.end_ids or (EOS_IDS if request.guide is not None else ())


def may_follow(state: int, ends: tuple[int, ...]) -> MayFollow:
    return lambda token_id: is_complete(state) if token_id in ends else allows(state, token_id)


def choose(cells: list[int], seed: int, counter: int, is_allowed: MayFollow) -> int:
    """The first token that is allowed from the one on that would be chosen freely; that one where none is."""
    first = next_token(cells, seed, counter, VOCAB)
    return next(filter(is_allowed, ((first + i) % VOCAB for i in range(VOCAB))), first)


def top_allowed(cells: list[int], counter: int, count: int, is_allowed: MayFollow) -> list[tuple[int, float]]:
    """The most likely of the allowed tokens, the best first, and then forbidden ones, as workers tell them."""
    state = mix(sum(mix(i, cell) for i, cell in enumerate(reversed(cells))), counter)
    tokens = itertools.chain((mix(state, index) % VOCAB for index in range(CANDIDATES)), range(VOCAB))
    found: dict[int, float] = {}
    for token_id in filter(is_allowed, tokens):
        found.setdefault(token_id, -0.1 * (len(found) + 1) - mix(state, token_id) % 1000 / 12_000)
        if len(found) == count:
            return list(found.items())
    forbidden = itertools.islice(itertools.filterfalse(is_allowed, range(VOCAB)), count - len(found))
    return [*found.items(), *((token_id, FORBIDDEN) for token_id in forbidden)]


class Automaton:
    """Implements guided.protocol.Matcher."""

    error = ""

    def __init__(self, guide: Guide) -> None:
        self._states = [first_state(guide)]

    @property
    def _state(self) -> int:
        return self._states[-1]

    @property
    def is_complete(self) -> bool:
        return is_complete(self._state)

    def fill(self, masks: NDArray[np.int32], row: int) -> None:
        is_allowed = (31 * _TOKENS + self._state % 1009) % 3 > 0
        bits = np.zeros(32 * masks.shape[1], dtype=np.uint8)
        bits[:VOCAB] = is_allowed & (not is_closed(self._state))
        masks[row] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        is_allowed = allows(self._state, token_id)
        self._states.append(next_state(self._state, token_id))
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        del self._states[len(self._states) - num_tokens :]


class SlowGuides:
    """Implements core.guides.Guides and the workers' MatcherSource. A guide is compiled when `finish` says so.

    What no live request uses is forgotten at once, as a full cache does.
    """

    def __init__(self) -> None:
        self.users: dict[RequestId, str] = {}  # live requests, and the texts of their guides
        self.waiting: dict[str, list[RequestId]] = {}  # texts that are being compiled, and who has not been told
        self._compiled: set[str] = set()
        self.tell: OnCompiled = lambda request_id, error: None  # the schedule decides when

    def on_compiled(self, tell: OnCompiled) -> None:
        self.tell = tell

    def begin(self, request_id: RequestId, guide: Guide, namespace: str) -> bool:
        assert request_id not in self.users, f"the guide of request {request_id} is asked for twice"
        if self.is_full(guide):
            raise Overloaded(f"{MAX_COMPILING} guides wait to be compiled")
        self.users[request_id] = guide.text
        if self.is_compiled(guide):
            return True
        self.waiting.setdefault(guide.text, []).append(request_id)
        return False

    def notes(self, request_id: RequestId) -> tuple[str, ...]:
        return ()

    def end(self, request_id: RequestId) -> None:
        text = self.users.pop(request_id, None)
        if text is None:
            return
        self.give_up(request_id)
        if text not in self.users.values():
            self._compiled.discard(text)

    def is_compiled(self, guide: Guide) -> bool:
        return guide.text in self._compiled

    def is_full(self, guide: Guide) -> bool:
        return not self.is_compiled(guide) and guide.text not in self.waiting and len(self.waiting) >= MAX_COMPILING

    def finish(self, text: str, error: str) -> list[RequestId]:
        """A guide has been compiled, or cannot be. Returns who is to be told."""
        told = self.waiting.pop(text)
        if told and not error:
            self._compiled.add(text)
        return told

    def give_up(self, request_id: RequestId) -> None:
        """A request waits no longer; the compiler goes on."""
        for told in self.waiting.values():
            if request_id in told:
                told.remove(request_id)

    def matcher(self, guide: Guide) -> Automaton:
        assert self.is_compiled(guide), f"a sequence runs under guide {guide.text}, which is not compiled for anybody"
        return Automaton(guide)
