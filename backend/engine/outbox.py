"""Outbox: responses that are ready, in order, and those of a static batch that wait for its end."""

from __future__ import annotations

from backend.api.request import RequestId
from backend.api.response import Response


class Outbox:
    def __init__(self) -> None:
        self._ready: list[Response] = []
        self._held: list[Response] = []

    def holds(self, request_id: RequestId) -> bool:
        """Whether a response of this id is held back."""
        return any(response.request_id == request_id for response in self._held)

    def put(self, response: Response, held: bool = False) -> None:
        """`held`: keep it until `let_go`."""
        (self._held if held else self._ready).append(response)

    def let_go(self) -> None:
        """The batch of the responses that are held has ended."""
        if self._held:
            self._ready += self._held
            self._held = []

    def take(self) -> list[Response]:
        """Hand over what is ready."""
        ready, self._ready = self._ready, []
        return ready
