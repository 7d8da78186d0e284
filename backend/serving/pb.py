"""The only module that uses triton_python_backend_utils: responses, error codes, flags and metric families.

It can be imported in a Triton stub only; tests bring a small module of that name. Each `send`, each `is_cancelled` and each
update of a metric is a round trip to the server process. No lock is held meanwhile, except for a stream's gate while the
poller asks, and the main thread sends nothing but refusals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # Only a stub has it, and without types.
from numpy.typing import NDArray

from backend.api import ErrorCode
from backend.serving import string_tensors
from backend.serving.protocols import FamilyHandle

# For each STRING input the stub looks the function up in that module, so this takes the place of Triton's own.
pb_utils.deserialize_bytes_tensor = string_tensors.deserialize

FINAL: int = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
MAX_ERROR_CHARS = 4096  # An error's text is cut off here. Only a request of many rows can have more to say.

_STATUS = {
    ErrorCode.INVALID_ARGUMENT: pb_utils.TritonError.INVALID_ARG,
    ErrorCode.NOT_FOUND: pb_utils.TritonError.NOT_FOUND,
    ErrorCode.UNAVAILABLE: pb_utils.TritonError.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: pb_utils.TritonError.UNSUPPORTED,
    ErrorCode.CANCELLED: pb_utils.TritonError.CANCELLED,
    ErrorCode.INTERNAL: pb_utils.TritonError.INTERNAL,
}


def data_response(arrays: list[tuple[str, NDArray[Any]]]) -> Any:
    """Triton's response with these named tensors."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays])


def error_response(code: ErrorCode, text: str) -> Any:
    """Triton's response with an error.

    The text may repeat what a client sent. A lone surrogate in it, which UTF-8 cannot hold, becomes a question mark.
    """
    readable = text[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode("utf-8")
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(readable, _STATUS[code]))


def new_metric_family(name: str, description: str, kind: str) -> FamilyHandle:
    """Register a metric family with Triton. `kind` is COUNTER, GAUGE or HISTOGRAM."""
    kind_of_triton = getattr(pb_utils.MetricFamily, kind)
    family: FamilyHandle = pb_utils.MetricFamily(name=name, description=description, kind=kind_of_triton)
    return family


def log_verbose(line: str) -> None:
    """Write a line to Triton's log, if its verbose logging is on. A round trip even if it is off."""
    pb_utils.Logger.log_verbose(line)


def numpy_round_trip_works() -> bool:
    """True if Triton's Python backend and this numpy agree on the layout of a dtype (see environment.check_numpy)."""
    sent = np.arange(6, dtype=np.int32).reshape(2, 3)
    handed_over = pb_utils.Tensor("probe", sent)
    received = pb_utils.Tensor.from_dlpack("probe", handed_over).as_numpy()
    return received.dtype == sent.dtype and received.strides == sent.strides and bool((received == sent).all())
