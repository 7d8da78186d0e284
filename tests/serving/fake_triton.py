"""A small triton_python_backend_utils: what backend.serving uses of it, with the real one's behaviour as observed.

`send` after FINAL raises, as Triton's does; an InferenceResponse holds tensors or an error.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        message.encode("utf-8")  # raises for a lone surrogate, as the binding does
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    @staticmethod
    def from_dlpack(name: str, other: Tensor) -> Tensor:
        return Tensor(name, other.as_numpy().copy())


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self._tensors, self._error = output_tensors or [], error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def error(self) -> TritonError | None:
        return self._error

    def has_error(self) -> bool:
        return self._error is not None

    def outputs(self) -> dict[str, np.ndarray]:
        return {tensor.name(): tensor.as_numpy() for tensor in self._tensors}


class Metric:
    def __init__(self, labels: dict[str, str], buckets: list[float] | None) -> None:
        self.labels, self.buckets = labels, buckets
        self.current = 0.0
        self.observed: list[float] = []
        self.num_updates = 0

    def set(self, value: float) -> None:
        self.current, self.num_updates = value, self.num_updates + 1

    def increment(self, value: float) -> None:
        assert value >= 0, "a counter only grows"
        self.current, self.num_updates = self.current + value, self.num_updates + 1

    def observe(self, value: float) -> None:
        self.observed.append(value)


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    created: list[MetricFamily] = []

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.metrics: list[Metric] = []
        MetricFamily.created.append(self)

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:
        self.metrics.append(Metric(labels, buckets))
        return self.metrics[-1]


class Logger:
    verbose: list[str] = []

    @staticmethod
    def log_verbose(line: str) -> None:
        Logger.verbose.append(line)


class ResponseSender:
    """Records what was sent. `gate`: sends wait for it. `failures`: raised by the next sends, in order."""

    def __init__(self) -> None:
        self.sent: list[tuple[InferenceResponse | None, int]] = []
        self.attempts = 0
        self.gate: threading.Event | None = None
        self.entered = threading.Semaphore(0)  # released as each send begins
        self.failures: list[Exception] = []
        self.client_gone = False
        self._finished = threading.Event()
        self.on_cancel_check: Callable[[], None] = lambda: None

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        self.attempts += 1
        self.entered.release()
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.failures:
            raise self.failures.pop(0)
        if self._finished.is_set():
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        self.sent.append((response, flags))
        if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self._finished.set()

    def is_cancelled(self) -> bool:
        self.on_cancel_check()
        return self.client_gone

    # ---- for tests ----

    def wait(self) -> list[InferenceResponse]:
        """All responses, once FINAL has been sent."""
        assert self._finished.wait(10), f"no FINAL; sent so far: {len(self.sent)}"
        return [response for response, _ in self.sent]

    @property
    def finals(self) -> list[int]:
        """Positions of the responses with FINAL."""
        return [n for n, (_, flags) in enumerate(self.sent) if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL]

    def error(self) -> str:
        """The message of the last response, which must be an error."""
        last = self.wait()[-1]
        assert last is not None and last.has_error(), f"no error: {last and last.outputs()}"
        return last.error().message()

    def column(self, name: str) -> list[object]:
        """All values of one output over all responses, flattened, in order."""
        return [v for r in self.wait() for v in r.outputs().get(name, np.array([])).reshape(-1).tolist()]


class InferenceRequest:
    def __init__(
        self,
        inputs: dict[str, np.ndarray],
        request_id: str = "",
        timeout: int = 0,
        parameters: dict[str, object] | None = None,
    ) -> None:
        self.sender = ResponseSender()
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self._request_id, self._timeout, self._parameters = request_id, timeout, parameters or {}

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def get_response_sender(self) -> ResponseSender:
        return self.sender
