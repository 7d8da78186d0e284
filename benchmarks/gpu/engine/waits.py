"""The host's own time: what its thread computes, less what it spends waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Calls that wait for a device; of a tensor only when it is on one.
_OF_DEVICES = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))
_OF_TENSORS = ("item", "tolist", "cpu", "numpy")


class HostClock:
    """Processor time of this thread, waits left out: a wait may spin."""

    def __init__(self) -> None:
        self._waited_ns = 0
        self._began_ns = 0

    def restart(self) -> None:
        self._waited_ns, self._began_ns = 0, time.thread_time_ns()

    def elapsed_ms(self) -> float:
        return (time.thread_time_ns() - self._began_ns - self._waited_ns) / 1e6

    def leave_out(self, wait: Callable[..., Any], applies: Callable[..., bool]) -> Callable[..., Any]:
        def waits(*arguments: Any, **options: Any) -> Any:
            if not applies(*arguments):
                return wait(*arguments, **options)
            began_ns = time.thread_time_ns()
            try:
                return wait(*arguments, **options)
            finally:
                self._waited_ns += time.thread_time_ns() - began_ns

        return waits


@contextmanager
def host_clock() -> Iterator[HostClock]:
    """Everything that waits for a device is told to the clock, while the context lasts."""
    clock = HostClock()
    places = [(owner, name, lambda *_: True) for owner, name in _OF_DEVICES]
    places += [(torch.Tensor, name, lambda tensor, *_: tensor.device.type != "cpu") for name in _OF_TENSORS]
    before = []
    for owner, name, applies in places:
        before.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, clock.leave_out(getattr(owner, name), applies))
    try:
        yield clock
    finally:
        for owner, name, original in before:
            if original is None:
                delattr(owner, name)  # was inherited
            else:
                setattr(owner, name, original)
