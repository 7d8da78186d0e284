"""Stubs: the stub processes of one life of a server, and which of them have died; Triton never tells.

A stub that ends while its model is loaded is the failure of that load, and one of ours whose model is unloaded has said so at
its end. Models of a repository of the user's own give no signs: one whose stub has ended was unloaded on purpose if Triton
says that it is not ready, or loaded anew if another stub serves it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from deploy.processes import Process, model_of_stub, stubs_of
from deploy.signs import Signs


class Stubs:
    def __init__(self, server_pid: int, is_ready: Callable[[str], bool | None]) -> None:
        """`is_ready`: whether Triton says that a model is ready; None where it does not answer."""
        self._server_pid, self._is_ready = server_pid, is_ready
        self._lock = threading.Lock()
        self._known: dict[Process, str] = {}  # with their models; '' where that is not known

    def take_in(self) -> None:
        """Record the stubs that live now, so that their deaths are noticed."""
        self._known = self._living()

    def dead(self, signs: Signs, *, is_watched: bool) -> list[Process]:
        """Stubs that were there when the server became ready, or have given a sign since, and have died. `is_watched`: the signs
        are being read, and an end is certain only when a stub's last words would have come.
        """
        with self._lock:  # The watch and who asks for failures both look.
            return self._dead(signs, is_watched)

    def _dead(self, signs: Signs, is_watched: bool) -> list[Process]:
        unloaded, signing = signs.unloaded(), {report.pid for report in signs.latest}
        if fresh := signing - {stub.pid for stub in self._known} - unloaded:
            self._known |= {stub: model for stub, model in self._living().items() if stub.pid in fresh}
        self._known = {stub: model for stub, model in self._known.items() if stub.pid not in unloaded}
        dead = [stub for stub in self._known if not stub.alive()]
        return [
            stub
            for stub in dead
            if (not is_watched or signs.has_said_all(stub.pid)) and (stub.pid in signing or self._is_missed(stub))
        ]

    def _living(self) -> dict[Process, str]:
        return {stub: model_of_stub(stub.pid) for stub in stubs_of(self._server_pid)}

    def _is_missed(self, stub: Process) -> bool:
        """True if a stub that has died without ever giving a sign of life is still needed."""
        if not (model := self._known[stub]):
            return True
        others = {other: name for other, name in self._living().items() if name == model}
        ready = False if others else self._is_ready(model)
        if ready is False:
            del self._known[stub]
            self._known |= others
        return ready is True
