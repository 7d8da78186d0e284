"""Counts the CPU time of the parts of a stub, or of the null engine, that a token passes. Only this benchmark loads it.

Each part is a function that is replaced by one which reads the thread's CPU clock before and behind it. What a part calls that
is a part itself is taken off its own time. A thread writes the sums to a file several times a second.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# (name, module, class or "", function)
STUB = (
    ("receive frame", "backend.wire.client", "", "receive_frame"),
    ("decode frame", "backend.wire.client", "", "decode_message"),
    ("route to stream", "backend.executor.executor", "Executor", "_on_message"),
    ("detokenise, collect", "backend.serving.delivery.pump", "ResponsePump", "_feed"),
    ("make arrays", "backend.serving.delivery.outputs", "SeparateOutput", "render"),
    ("build response", "backend.serving.pb", "", "data_response"),
    ("send", "backend.serving.delivery.pump", "ResponsePump", "_send"),
    ("serve a stream", "backend.serving.delivery.pump", "ResponsePump", "_serve"),
    ("cancellation sweep", "backend.serving.delivery.cancellation", "CancellationPoller", "sweep"),
    ("housekeeping", "backend.serving.server", "ModelServer", "_pulse"),
    ("metrics", "backend.serving.server", "ModelServer", "_tick"),
)
ENGINE = (
    ("step", "backend.engine.core", "EngineCore", "step"),
    ("schedule", "backend.engine.core", "EngineCore", "_schedule"),
    ("make responses", "backend.engine.publish", "", "result_response"),
    ("deliver", "backend.wire.engine_server", "EngineServer", "deliver"),
    ("encode frame", "backend.wire.engine_server", "", "encode_frame"),
    ("socket", "backend.wire.outgoing", "Outgoing", "send"),
)
PERIOD_S = 0.25


class Part:
    def __init__(self) -> None:
        self.calls = 0
        self.cpu_ns = 0  # its own, without that of parts within it


_inner = threading.local()


def counted(function: Callable[..., Any], part: Part) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        outer = getattr(_inner, "ns", 0)
        _inner.ns = 0
        began = time.thread_time_ns()
        try:
            return function(*arguments, **named)
        finally:
            took = time.thread_time_ns() - began
            part.calls += 1  # Other threads may count at the same moment; one in a million is lost.
            part.cpu_ns += took - _inner.ns
            _inner.ns = outer + took

    return call


def start(kind: str) -> None:
    """Replace the parts, and write what they count to EVERBATCH_WAY_PROBE/kind.json from now on."""
    # All modules are imported first, in the order that they expect.
    importlib.import_module("backend.serving.assembly" if kind == "stub" else "backend.engine.loop")
    parts = {}
    for name, module_name, class_name, function in STUB if kind == "stub" else ENGINE:
        module = importlib.import_module(module_name)
        place = getattr(module, class_name) if class_name else module
        parts[name] = Part()
        setattr(place, function, counted(getattr(place, function), parts[name]))
    file = Path(os.environ["EVERBATCH_WAY_PROBE"], f"{kind}.json")
    threading.Thread(target=_write, args=(parts, file), daemon=True).start()
    print(f"way: the parts of the {kind} are counted", file=sys.stderr)


def _write(parts: dict[str, Part], file: Path) -> None:
    while True:
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps({name: [part.calls, part.cpu_ns] for name, part in parts.items()}))
        fresh.replace(file)
        time.sleep(PERIOD_S)
