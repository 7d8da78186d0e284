"""Which trace a request belongs to: W3C Trace Context (https://www.w3.org/TR/trace-context/), levels 1 and 2."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import NamedTuple

MAX_STATE = 512  # characters of tracestate that are kept; a longer one is dropped whole, as the specification allows
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


class Caller(NamedTuple):
    """The trace headers of a request, unchecked; empty strings if the request has none."""

    traceparent: str = ""
    tracestate: str = ""


class TraceContext(NamedTuple):
    """A request that is traced."""

    trace_id: bytes  # 16
    span_id: bytes  # 8, of the request's own span
    parent_id: bytes  # 8; empty: it is the first span of its trace
    state: str


NO_CALLER = Caller()
RandomBits = Callable[[int], int]


def begin_trace(
    caller: Caller, sample_ratio: float, random_bits: RandomBits = random.getrandbits
) -> TraceContext | None:
    """None if the request is not traced: the caller has decided so, or without a caller the ratio has.

    The choice is a function of the trace id, as in OpenTelemetry's TraceIdRatioBased sampler, so that services with the same
    ratio choose the same traces.
    """
    span_id = _id_of(8, random_bits)
    if (parent := _read_parent(caller.traceparent)) is not None:
        trace_id, parent_id, is_sampled = parent
        return TraceContext(trace_id, span_id, parent_id, _read_state(caller.tracestate)) if is_sampled else None
    trace_id = _id_of(16, random_bits)
    if int.from_bytes(trace_id[8:], "big") >= round(sample_ratio * 2**64):
        return None
    return TraceContext(trace_id, span_id, b"", "")


def _id_of(size: int, random_bits: RandomBits) -> bytes:
    """Random bytes that are not all zero."""
    return (random_bits(8 * size) or 1).to_bytes(size, "big")


def _read_parent(text: str) -> tuple[bytes, bytes, bool] | None:
    """(trace id, span id, is sampled); None for what is no valid traceparent, which counts as absent."""
    found = _PARENT.fullmatch(text) if len(text) <= MAX_STATE else None
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return bytes.fromhex(trace_id), bytes.fromhex(parent_id), bool(int(flags, 16) & _SAMPLED)


def _read_state(text: str) -> str:
    return text if len(text) <= MAX_STATE and text.isascii() and text.isprintable() else ""
