"""PreparedAdapter: a LoRA adapter that the workers have read and checked, in the form in which they compute with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, weakref_slot=True, eq=False)
class PreparedAdapter:
    """Whoever holds it holds the weights: the engine's host level of adapters does."""

    content: str  # hash of configuration and weights: two adapters of the same hash are the same
    max_rank: int
    num_bytes: int  # on the host
    device_bytes: int  # on the device
    weights: object  # the workers' own
