"""Settings of Python's garbage collector for the processes that responses pass through."""

from __future__ import annotations

import gc

THRESHOLD = 20_000  # new container objects that trigger a collection of the young generation


def calm_garbage_collector() -> None:
    """Exempt all present objects from garbage collection, and collect later ones seldom. Call it when everything is loaded.

    Otherwise a full collection visits every object of torch, which takes 60 ms within a step, and the small collections take
    a fifth of the host's time at 256 rows. They would find little, because neither a step of the engine nor a response in a
    stub makes reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
