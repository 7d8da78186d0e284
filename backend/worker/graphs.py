"""Graphs: steps of the same shape, recorded once as a CUDA graph and replayed.

A function runs eagerly the first time its key is seen (kernels are compiled then), is captured the second time, and replayed from
then on. A captured function must read all changing inputs from tensors that keep their addresses, and its result is overwritten
by the next replay. All graphs share one memory pool. At most MAX_GRAPHS keys are kept: beyond that, the least recently used one
is dropped.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("everbatch.worker")
MAX_GRAPHS = 96


class Captured(NamedTuple):
    replay: Callable[[], None]
    result: Tensor


Step = Callable[[], Tensor]


class CudaCapture:
    """Captures CUDA graphs into one memory pool.

    It does not use torch.cuda.graph, which would run the garbage collector and empty the allocator's cache at each capture.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, step: Step) -> Captured:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                result = step()
            finally:
                graph.capture_end()
        return Captured(graph.replay, result)


class Graphs:
    def __init__(self, make_capture: Callable[[], Callable[[Step], Captured]] | None) -> None:
        """`make_capture` is CudaCapture on a GPU; with None every step runs eagerly."""
        self._make_capture = make_capture
        self._capture = make_capture() if make_capture is not None else None
        self._known: OrderedDict[Hashable, Captured | None] = OrderedDict()  # None: the key has run once

    def __len__(self) -> int:
        return sum(captured is not None for captured in self._known.values())

    def run(self, key: Hashable, step: Step) -> Tensor:
        """The result of `step`, which must be the same function for the same key."""
        capture = self._capture
        if capture is None:
            return step()
        if key not in self._known:
            self._remember(key, None)
            return step()
        captured = self._known[key]
        if captured is None:
            captured = self._try_capture(capture, key, step)
            if captured is None:
                return step()
        self._known.move_to_end(key)
        captured.replay()
        return captured.result

    def clear(self) -> None:
        """Drop all graphs, because a tensor that they read has moved, and start a new memory pool: one dies with its graphs."""
        self._known.clear()
        if self._make_capture is not None and self._capture is not None:
            self._capture = self._make_capture()

    def _try_capture(self, capture: Callable[[Step], Captured], key: Hashable, step: Step) -> Captured | None:
        """Capture `step`. If that fails, log the reason, turn graphs off for good and return None."""
        try:
            captured = capture(step)
        except RuntimeError as error:
            # Ending a failed capture fails as well, so the error before that one is the cause.
            cause = str(error.__context__ or error).splitlines()[0]
            log.warning("CUDA graphs: off, because capturing a step of %s failed: %s", key, cause)
            self._capture = None
            self._known.clear()
            return None
        self._remember(key, captured)
        return captured

    def _remember(self, key: Hashable, captured: Captured | None) -> None:
        self._known[key] = captured
        self._known.move_to_end(key)
        if len(self._known) > MAX_GRAPHS:
            self._known.popitem(last=False)
