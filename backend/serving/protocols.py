"""The parts of Triton's Python backend and of the executor that the serving room uses. Tests bring their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from backend.api import EngineStats, Request, RequestId, Response, SessionId
from backend.api.stats import PauseCounts
from backend.core.messages import Hello, Resume

OnResponse = Callable[[Response], None]


class NamedTensor(Protocol):
    """The part of Triton's Tensor that is used here."""

    def name(self) -> str: ...

    def as_numpy(self) -> NDArray[Any]: ...


class RequestHeader(Protocol):
    """The part of Triton's InferenceRequest that is read here."""

    def request_id(self) -> str: ...

    def timeout(self) -> int: ...

    def parameters(self) -> str: ...


class ResponseSender(Protocol):
    """The part of Triton's response sender that is used here. `response` is an object that pb.py has made."""

    def send(self, response: Any = None, flags: int = 0) -> None: ...

    def is_cancelled(self) -> bool: ...


class TritonRequest(RequestHeader, Protocol):
    """The part of Triton's InferenceRequest that is used here."""

    def inputs(self) -> Iterable[NamedTensor]: ...

    def get_response_sender(self) -> ResponseSender: ...


class EngineClient(Protocol):
    """The part of backend.executor.Executor that is used here."""

    @property
    def hello(self) -> Hello | None: ...

    def submit(self, request: Request, on_response: OnResponse, resume: Resume | None = None) -> RequestId: ...

    def cancel_request(
        self, request_id: RequestId, keep_output_tokens: int | None = None, sequence_index: int | None = None
    ) -> None: ...

    def stop_session(
        self, session_id: SessionId, end: bool, on_response: OnResponse, namespace: str = ""
    ) -> RequestId: ...

    @property
    def adapters(self) -> Mapping[str, str]: ...
    @property
    def pauses(self) -> PauseCounts: ...

    def name_adapter(self, name: str, directory: str | None, on_response: OnResponse) -> RequestId: ...

    def look(self, on_response: OnResponse) -> RequestId: ...

    def latest_stats(self) -> EngineStats | None: ...

    def is_ready(self) -> bool: ...

    def can_enqueue_requests(self) -> bool:
        """True while it is ready, and while requests may wait until it is."""
        ...

    def why_not_ready(self) -> str:
        """One clause for a person; empty while it is ready."""
        ...

    @property
    def has_given_up(self) -> bool:
        """True if the engine will not be started again. Only the model that owns the engine knows."""
        ...

    def shutdown(self) -> None: ...


class MetricHandle(Protocol):
    """The part of Triton's Metric that is used here."""

    def set(self, value: float) -> None: ...

    def increment(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


class FamilyHandle(Protocol):
    """The part of Triton's MetricFamily that is used here."""

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> MetricHandle: ...
