"""LiveFeed: what the engine does, for everybody who watches it (docs/page.md).

One poller asks the model for views (backend/api/live_view.py) for all viewers, and only while there is one. A view is passed on
as the model has written it. It holds no text, token or name of a client.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from gateway.errors import GatewayError, unavailable
from gateway.triton_client import Job, Piece, TritonLink

SLOWEST_HZ, FASTEST_HZ, USUAL_HZ = 1.0, 10.0, 5.0  # views a second that a viewer may ask for
LOOK_TIMEOUT_S = 5.0  # a step of a large model on a CPU may take seconds, and a view is made between two steps
AWAY_PERIOD_S = 1.0  # from one question to the next while the engine does not answer
UNREADABLE = "what the engine answers cannot be read"
_log = logging.getLogger("everbatch.gateway")
Ask = Callable[[Job], Awaitable[Piece]]


class LiveFeed:
    """The latest event, and the poller that renews it as often as the viewer wants who wants it most often."""

    def __init__(self) -> None:
        self._rates: list[float] = []  # in Hz, one of each viewer
        self._poller: asyncio.Task[None] | None = None
        self._renewed = asyncio.Condition()
        self._event, self._number = b"", 0  # the latest event, and how many there have been

    async def events(self, link: TritonLink, hz: float) -> AsyncGenerator[bytes, None]:
        """Yield the latest server-sent event, `hz` times a second at most. A viewer that reads slowly misses those in between."""
        self._rates.append(hz)
        seen = self._number  # an event from before is as old as the viewer before
        try:
            if self._poller is None:
                self._poller = asyncio.ensure_future(self._poll(link))
            while True:
                await self._newer_than(seen)
                seen = self._number
                yield self._event
                await asyncio.sleep(1 / hz)
        finally:
            self._rates.remove(hz)
            if not self._rates and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    async def _newer_than(self, number: int) -> None:
        async with self._renewed:
            await self._renewed.wait_for(lambda: self._number > number)

    async def _poll(self, link: TritonLink) -> None:
        while True:
            try:
                async with link.asking() as ask:
                    await self._ask_again_and_again(ask)
            except GatewayError as error:
                await self._publish(away_event(error))
            except Exception as error:  # Viewers would wait for ever if the poller ended.
                _log.error("looking at the engine failed: %s", type(error).__name__)
                await self._publish(away_event(unavailable("the view failed; the server's log says so")))
            await asyncio.sleep(AWAY_PERIOD_S)

    async def _ask_again_and_again(self, ask: Ask) -> None:
        """Until that fails. Raises GatewayError."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            await self._publish(view_event(await _look(ask)))
            await asyncio.sleep(max(0.0, began + 1 / max(self._rates) - clock()))

    async def _publish(self, event: bytes) -> None:
        async with self._renewed:
            self._event, self._number = event, self._number + 1
            self._renewed.notify_all()


async def slots_of(link: TritonLink) -> int | None:
    """The slots of the first model's persistent batch; None where the engine does not say."""
    try:
        return int((await look_at(link, ""))["latest"]["max_num_active_requests"]) or None
    except (GatewayError, msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return None


async def look_at(link: TritonLink, triton_model: str) -> dict[str, Any]:
    """A LiveView of one model's engine, by names. Raises GatewayError."""
    async with link.asking() as ask:
        view: dict[str, Any] = msgspec.json.decode(await _look(ask, triton_model))
    return view


async def _look(ask: Ask, triton_model: str = "") -> bytes:
    """A LiveView as JSON; the first model's where none is named. Raises GatewayError."""
    job = Job({"look": True}, f"{secrets.token_hex(12)}-0", "", triton_model=triton_model)
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            view = bytes((await ask(job)).live)
    except TimeoutError:
        raise unavailable(f"the engine has not answered for {LOOK_TIMEOUT_S:g} s") from None
    except msgspec.MsgspecError:  # The viewers hear of it; the next view may be whole.
        raise unavailable(UNREADABLE) from None
    if view == b"null":
        raise unavailable("the model does not say what its engine does: it is of an older version")
    return view


def view_event(view: bytes) -> bytes:
    """`view` holds no line break: the model writes JSON in one line."""
    return b"event: view\ndata: " + view + b"\n\n"


def away_event(error: GatewayError) -> bytes:
    return b"event: away\ndata: " + msgspec.json.encode({"message": error.message}) + b"\n\n"


def rate_of(given: str) -> float:
    """The parameter `hz` of a request. Raises GatewayError."""
    try:
        hz = float(given)
    except ValueError:
        hz = math.nan
    if not SLOWEST_HZ <= hz <= FASTEST_HZ:  # nor is it so for what is no number
        text = f"hz is {given[:20]!r}, a number from {SLOWEST_HZ:g} to {FASTEST_HZ:g} is expected"
        raise GatewayError(400, text, "hz", "invalid_value")
    return hz
