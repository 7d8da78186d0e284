"""What a ModelServer is given: Triton's requests and the executor, as far as it uses them. Tests bring their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from backend.api import EngineStats, Request, RequestId, Response, SessionId
from backend.core.messages import Hello
from backend.serving.pump import ResponseSender
from backend.serving.reading import NamedTensor
from backend.serving.requests import RequestHeader

OnResponse = Callable[[Response], None]


class TritonRequest(RequestHeader, Protocol):
    """The part of Triton's InferenceRequest that is used here."""

    def inputs(self) -> Iterable[NamedTensor]: ...

    def get_response_sender(self) -> ResponseSender: ...


class EngineClient(Protocol):
    """The part of backend.executor.Executor that is used here."""

    @property
    def hello(self) -> Hello | None: ...

    def submit(self, request: Request, on_response: OnResponse) -> RequestId: ...

    def cancel_request(
        self, request_id: RequestId, keep_output_tokens: int | None = None, sequence_index: int | None = None
    ) -> None: ...

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
