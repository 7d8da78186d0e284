"""Disaggregated serving on the wire: the request parameter `request_type`, and the tensor `context_phase_params`.

    context_only      one server computes the prompt; its answer holds the first token, and a state in context_phase_params
    generation_only   another one takes the same request with that state, and goes on with it

The state is opaque here. The engine alone reads it, and checks every part of it (core/kv_state.py, engine/transfer.py).
"""

from __future__ import annotations

from typing import Any

from backend.api import InvalidRequest, Unsupported
from backend.serving.intake.batch import Batch
from backend.serving.tensors import ModelTensors

BOTH, CONTEXT, GENERATION = REQUEST_TYPES = ("context_and_generation", "context_only", "generation_only")
TENSOR = "context_phase_params"


def read_request_type(value: Any) -> str:
    """The request type; both phases where the parameter is absent. Raises InvalidRequest for a value that is none."""
    if value is None:
        return BOTH
    if not isinstance(value, str) or value not in REQUEST_TYPES:
        raise InvalidRequest(f"request_type is {ascii(value)[:40]}, allowed are {', '.join(REQUEST_TYPES)}")
    return value


def check_has_phases(request_type: str, tensors: ModelTensors) -> None:
    """Raise Unsupported when a model without the tensor of the state is asked for one phase."""
    if request_type != BOTH and TENSOR not in tensors.by_name():
        raise Unsupported(
            f"request_type is {request_type}, and {tensors.model} has no tensor for the state ({TENSOR}); send token ids to "
            f"tensorrt_llm, or leave request_type out"
        )


def read_phase(batch: Batch, row: int, request_type: str) -> dict[str, Any]:
    """The fields of a Request whose phases run on two servers. Raises InvalidRequest for a state without its type, or a type
    without its state.

    The first token is sampled again behind the state, from the same logits and the same random stream.
    """
    given = batch.vector(TENSOR, row) if batch.has(TENSOR) else None
    if (given is None) == (request_type == GENERATION):
        raise InvalidRequest(
            f"request_type is {request_type} and {TENSOR} is {'not ' if given is None else ''}given; it goes with "
            f"{GENERATION} alone"
        )
    return {"context_only": request_type == CONTEXT, "kv_state": b"" if given is None else given.tobytes()}
