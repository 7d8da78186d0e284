"""The one door to triton_python_backend_utils: responses, error codes, flags, metric families.

Importable in a Triton stub only (tests bring a small module of that name). Every call of `send`, `is_cancelled` and
every metric update is a round trip to the server process: never under a lock, and on the main thread only to refuse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from backend.api import ErrorCode
from backend.serving import string_tensors

pb_utils.deserialize_bytes_tensor = string_tensors.deserialize  # the stub looks it up there for each STRING input

FINAL: int = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
MAX_ERROR_CHARS = 4096  # of an error's text; what a request of many rows has to say beyond that is cut off

_STATUS = {
    ErrorCode.INVALID_ARGUMENT: pb_utils.TritonError.INVALID_ARG,
    ErrorCode.NOT_FOUND: pb_utils.TritonError.NOT_FOUND,
    ErrorCode.UNAVAILABLE: pb_utils.TritonError.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: pb_utils.TritonError.UNSUPPORTED,
    ErrorCode.CANCELLED: pb_utils.TritonError.CANCELLED,
    ErrorCode.INTERNAL: pb_utils.TritonError.INTERNAL,
}


def data_response(arrays: list[tuple[str, np.ndarray]]) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays])


def error_response(code: ErrorCode, message: str) -> Any:
    """HTTP clients never see Triton's status code, so the message begins with it: `[UNAVAILABLE] ...`.

    A message may repeat what a client sent: a lone surrogate in it, which no UTF-8 can hold, becomes a question mark.
    """
    text = message[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode("utf-8")
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"[{code}] {text}", _STATUS[code]))


def new_metric_family(name: str, description: str, kind: str) -> Any:
    """`kind`: COUNTER, GAUGE or HISTOGRAM."""
    return pb_utils.MetricFamily(name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind))


def numpy_round_trip_works() -> bool:
    """Whether this Triton's Python backend and this numpy agree on the layout of a dtype (see
    environment.check_numpy).
    """
    sent = np.arange(6, dtype=np.int32).reshape(2, 3)
    handed_over = pb_utils.Tensor("probe", sent)
    received = pb_utils.Tensor.from_dlpack("probe", handed_over).as_numpy()
    return received.dtype == sent.dtype and received.strides == sent.strides and bool((received == sent).all())
