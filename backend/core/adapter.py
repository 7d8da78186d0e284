"""PreparedAdapter: a LoRA adapter that the workers have read and checked, in the form in which they compute with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, weakref_slot=True, eq=False)
class PreparedAdapter:
    """Keeps the weights in memory as long as it is referenced, which the engine does from its host cache of adapters."""

    content: str  # hash of configuration and weights: two adapters of the same hash are the same
    max_rank: int
    num_bytes: int  # size of its pages on the host
    device_bytes: int  # size of its pages on the device
    weights: object  # in the form that the workers use
