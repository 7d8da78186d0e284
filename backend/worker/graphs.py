"""Graphs: steps of the same shape, recorded once as a CUDA graph and replayed.

A function runs eagerly the first time its key is seen (kernels are compiled then), is captured the second time, and replayed from
then on. It must read what changes from step to step from tensors that stay where they are; what it returns is overwritten by
the next replay. All graphs share one memory pool; the least recently used goes when there are MOST of them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("everbatch.worker")
MOST = 96


class Captured(NamedTuple):
    replay: Callable[[], None]
    result: Tensor


Step = Callable[[], Tensor]


class CudaCapture:
    """Captures into one memory pool."""

    def __init__(self) -> None:
        self._pool: tuple[int, int] | None = None

    def __call__(self, step: Step) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()
        self._pool = graph.pool()
        return Captured(graph.replay, result)


class Graphs:
    def __init__(self, capture: Callable[[Step], Captured] | None):
        """capture: None runs everything eagerly."""
        self._capture = capture
        self._known: OrderedDict[Hashable, Captured | None] = OrderedDict()  # None: has run once

    def __len__(self) -> int:
        return sum(captured is not None for captured in self._known.values())

    def run(self, key: Hashable, step: Step) -> Tensor:
        """The result of `step`, which must be the same function for the same key."""
        if self._capture is None:
            return step()
        if key not in self._known:
            self._known[key] = None
            return step()
        captured = self._known[key]
        if captured is None:
            captured = self._try_capture(key, step)
            if captured is None:
                return step()
        self._known.move_to_end(key)
        captured.replay()
        return captured.result

    def clear(self) -> None:
        """Forget all, because a tensor that they read has moved."""
        self._known.clear()

    def _try_capture(self, key: Hashable, step: Step) -> Captured | None:
        """None, and no further attempts, when it cannot be captured; the log says why."""
        try:
            captured = self._capture(step)
        except RuntimeError as error:
            log.warning("CUDA graphs: off, because capturing a step of %s failed: %s", key, str(error).splitlines()[0])
            self._capture = None
            self.clear()
            return None
        self._known[key] = captured
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        return captured
