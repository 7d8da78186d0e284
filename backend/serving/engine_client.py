"""What a ModelServer asks of the engine, so that tests can bring an engine of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from backend.api import EngineStats, Request, RequestId, Response, SessionId
from backend.core.messages import Hello

OnResponse = Callable[[Response], None]


class EngineClient(Protocol):
    """The part of backend.executor.Executor that is used here."""

    @property
    def hello(self) -> Hello | None: ...

    def submit(self, request: Request, on_response: OnResponse) -> RequestId: ...

    def cancel_request(self, request_id: RequestId, keep_output_tokens: int | None = None) -> None: ...

    def stop_session(
        self, session_id: SessionId, end: bool, on_response: OnResponse, namespace: str = ""
    ) -> RequestId: ...

    def latest_stats(self) -> EngineStats | None: ...

    def is_ready(self) -> bool: ...

    @property
    def has_given_up(self) -> bool:
        """Whether the engine will not be started again. Only the model that owns the engine knows."""
        ...

    def shutdown(self) -> None: ...
