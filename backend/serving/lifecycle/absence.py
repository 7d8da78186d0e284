"""Absence: what a model does with its requests while its engine is away on purpose.

Where a server has several models (docs/several-models.md), the launcher ends an engine that is idle, or that an operator has
unloaded, and says so ahead of that in the file `away` beside the engine's socket. Requests that come from then on are held
(`asleep`: the launcher sees that there are some, and loads the engine again) or refused with the reason (`unloaded`, `failed`).
Held requests are bounded in number, bytes and time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from backend.api import EngineUnavailable, ErrorCode, Overloaded
from backend.api.config.multi_model import Notice

MAX_BYTES = 256 << 20  # the most bytes of inputs that are held, all requests together


class Keepable(Protocol):
    """Inputs of a request, and how to copy them."""

    num_bytes: int

    def keep(self) -> None: ...


class _Held(NamedTuple):
    until: float
    num_bytes: int
    go_on: Callable[[], None]
    refuse: Callable[[ErrorCode, str], None]


class Absence:
    """Any thread may hold a request; the housekeeper's thread looks. `path`: the file; None: this engine never is away."""

    def __init__(self, path: Path | None, max_requests: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._max_requests, self._clock = path, max_requests, clock
        self._lock = threading.Lock()
        self._held: list[_Held] = []

    def notice(self) -> Notice | None:
        """The launcher's notice; None: the engine is not away. A file that cannot be read counts as `asleep`."""
        if self._path is None:
            return None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Notice)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError):  # The launcher replaces it as a whole, so this is no half of a file.
            return Notice("asleep")

    def take(
        self, num_bytes: int, go_on: Callable[[], None], refuse: Callable[[ErrorCode, str], None]
    ) -> Callable[[], None] | None:
        """A function that holds a request, which is to be called once its inputs are copied; None: the engine is not away.

        `look` calls `go_on` or `refuse` of it. Raises EngineUnavailable with the launcher's reason, or Overloaded.
        """
        notice = self.notice()
        if notice is None:
            return None
        if notice.state != "asleep":
            raise EngineUnavailable(notice.why)
        held = _Held(self._clock() + notice.hold_s, num_bytes, go_on, refuse)
        with self._lock:
            self._check_room(num_bytes)
        return lambda: self._hold(held)

    def holds(self, batch: Keepable, go_on: Callable[[], None], refuse: Callable[[ErrorCode, str], None]) -> bool:
        """True if the engine is away, and the request with these inputs waits for it. Raises what `take` raises."""
        hold = self.take(batch.num_bytes, go_on, refuse)
        if hold is None:
            return False
        batch.keep()
        hold()
        return True

    def look(self, is_ready: bool) -> str:
        """Let the held requests go on where the engine is back; refuse those that have waited for too long, or whose engine does
        not come back. Returns why requests are refused; empty while they are not.
        """
        notice, now = self.notice(), self._clock()
        why = "" if notice is None or notice.state == "asleep" else notice.why
        with self._lock:
            is_back = notice is None and is_ready
            ended: list[_Held] = []
            kept: list[_Held] = []
            for each in self._held:
                (ended if why or is_back or now >= each.until else kept).append(each)
            self._held = kept
        for each in ended:
            if is_back:
                each.go_on()
            else:
                each.refuse(ErrorCode.UNAVAILABLE, why or "the model was not loaded in time; send the request again")
        return why

    def _hold(self, held: _Held) -> None:
        with self._lock:
            self._held.append(held)

    def _check_room(self, num_bytes: int) -> None:
        if len(self._held) >= self._max_requests:
            raise Overloaded(
                f"{len(self._held)} requests wait for the model to be loaded, the limit is {self._max_requests} "
                "(limits.max_queue_size); send the request again later"
            )
        if sum(each.num_bytes for each in self._held) + num_bytes > MAX_BYTES:
            raise Overloaded(
                f"the requests that wait for the model to be loaded hold more than {MAX_BYTES} bytes with this one; send it "
                "again later"
            )
