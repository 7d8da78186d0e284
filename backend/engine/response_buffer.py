"""ResponseBuffer: responses that are ready, in order, and responses of a static batch held until the batch ends."""

from __future__ import annotations

from backend.api.request import RequestId
from backend.api.response import Response


class ResponseBuffer:
    def __init__(self) -> None:
        self._ready: list[Response] = []
        self._held: list[Response] = []

    def holds(self, request_id: RequestId) -> bool:
        """True if a response of this request is held."""
        return any(response.request_id == request_id for response in self._held)

    def put(self, response: Response, held: bool = False) -> None:
        """Add a response. `held`: hold it until `let_go`."""
        (self._held if held else self._ready).append(response)

    def let_go(self) -> None:
        """Release the held responses: their batch has ended."""
        if self._held:
            self._ready += self._held
            self._held = []

    def take(self) -> list[Response]:
        """Return the responses that are ready."""
        ready, self._ready = self._ready, []
        return ready
