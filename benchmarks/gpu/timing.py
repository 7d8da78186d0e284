"""The time of one call on the GPU: the median over replays of a CUDA graph that holds a call for each copy of the inputs.

A graph leaves the host out, and copies that together are larger than the L2 cache leave the cache out. What cannot be captured
(a call that waits for the device) is launched in a loop.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch

COLD_BYTES = 256 << 20  # several times any L2 cache
MIN_COPIES, MAX_COPIES = 4, 64
MAX_BYTES = 24 << 30  # all copies together
GRAPH_US = 2000.0  # a replay should be at least as long: events count by half a microsecond
MEASURED_US = 150_000.0  # all replays together
MIN_REPLAYS, MAX_REPLAYS = 7, 100


class Timing(NamedTuple):
    us: float
    how: str  # graph, or launches


def copies_for(bytes_of_one: int, is_warm: bool) -> int:
    """How many copies of the inputs take turns."""
    if is_warm:
        return MIN_COPIES
    wanted = max(MIN_COPIES, -(-COLD_BYTES // max(1, bytes_of_one)))
    return max(2, min(wanted, MAX_COPIES, MAX_BYTES // max(1, bytes_of_one)))


def time_calls(run: Callable[[Any], object], copies: Sequence[Any]) -> Timing:
    """`run` must have been called before: compilation is not timed."""
    torch.cuda.synchronize()

    def once() -> None:
        for copy in copies:
            run(copy)

    estimate = max(1.0, _events(once) / len(copies))
    rounds = max(1, round(GRAPH_US / (estimate * len(copies))))
    try:
        graph = _captured(once, rounds)
    except RuntimeError:
        torch.cuda.synchronize()
        _release_generator()
        calls, replay, how = len(copies), once, "launches"
    else:
        calls, replay, how = rounds * len(copies), graph.replay, "graph"
    replay()
    replays = int(min(MAX_REPLAYS, max(MIN_REPLAYS, MEASURED_US / (estimate * calls))))
    return Timing(median(_events(replay) for _ in range(replays)) / calls, how)


def _release_generator() -> None:
    """A failed capture leaves torch's random generator in capture, so that it refuses all work; the next capture ends that."""
    _captured(lambda: torch.empty(1, device="cuda").zero_(), 1)


def _captured(once: Callable[[], object], rounds: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        once()  # libraries allocate their workspaces for this stream now
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            once()
    return graph


def _events(call: Callable[[], object]) -> float:
    """Returns microseconds on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread once so much time has gone."""

    def expired(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
