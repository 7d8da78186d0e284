"""Engines in this process, one after the other: the first is dropped at a moment of the test's choice, as if it were killed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from backend.api import Request, RequestId, Response
from backend.core.messages import CLIENT_SHIFT, Command, Hello, Resume, Submit
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.engine.restoring import restore_sessions
from backend.engine.session_files import in_memory
from backend.executor.replay import Replay


@dataclass
class Client:
    """What a client has had of one request."""

    responses: list[Response] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return bool(self.responses) and self.responses[-1].is_final


class Lives:
    """One client of an engine that may die."""

    def __init__(
        self, make: Callable[[], EngineCore], keeps_sessions: bool = True, files: tuple[int, int] | None = None
    ) -> None:
        """`files`: with the sessions of another one, as after a restart of a whole server with `sessions.directory`."""
        self._make, self._now_s = make, 0.0
        self.files = files or (in_memory() if keeps_sessions else None)
        self.replay = Replay()
        self._counter, self._number = itertools.count(1), 0
        self._begin()

    def _begin(self) -> None:
        self.core = self._make()
        if self.files is not None:
            restore_sessions(self.core, self.files)
        self.loop = EngineLoop(self.core)
        self._number += 1
        self.index = 3 * self._number  # another one at each engine
        hello = Hello(self.index, self.core.model, "", self.core.config, engine=str(self._number))
        assert self.replay.greet(hello) == []
        for command in self.replay.again(self._now_s):
            self.tell(command)
        for command in self.replay.let_go(self._now_s):
            self.tell(command)

    def tell(self, command: Command) -> None:
        self.loop._apply(command, self.core.clock.monotonic_ns())

    def ask(self, request: Request, resume: Resume | None = None) -> Client:
        client, request_id = Client(), RequestId(self.index << CLIENT_SHIFT | next(self._counter))
        if resume is None and request.session is not None:
            resume = Resume(turn=f"turn-{request_id}")
        command = Submit(request_id, request, resume)
        self.replay.add(request_id, client.responses.append, command, self._now_s)
        self.tell(command)
        return client

    def step(self) -> bool:
        """Returns whether anything came of it."""
        self.core.begin_poll()
        self.loop._advance_trials()
        self.loop._cancel_late()
        responses = self.core.step()
        self.core.sessions.flush()
        for response in responses:
            told = self.replay.take(response, 1)
            if told is not None:
                on_response, response = told
                on_response(response)
        return bool(responses)

    def run(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not until():
            assert time.monotonic() < deadline, "it does not end"
            if not self.step():
                time.sleep(0.0005)  # a guide is compiled, in a process of its own

    def crash(self) -> None:
        """The engine is dropped with all it has, and another one takes over."""
        self.core.close()
        self.replay.hold(self._now_s)
        self._begin()
