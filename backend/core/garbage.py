"""How seldom Python looks for reference cycles in the processes that responses go through."""

from __future__ import annotations

import gc

THRESHOLD = 20_000  # containers made since the last look


def calm_garbage_collector() -> None:
    """Exempt all objects that exist now from garbage collection, and collect the others seldom. Call it when all is loaded.

    Otherwise a full collection visits every object of torch, which takes 60 ms within a step, and the small collections take
    a fifth of the host's time at 256 rows. They would find little, because neither a step of the engine nor a response in a
    stub makes reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
