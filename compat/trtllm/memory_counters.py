"""MemoryCounters: memory that the GptManagers of this process hold."""

from __future__ import annotations

import threading

_lock = threading.Lock()


class MemoryCounters:
    """Bytes by kind of memory. `gpu`: the KV pools, on any device; the other kinds are not used."""

    _the_one: MemoryCounters | None = None

    def __init__(self) -> None:
        self.gpu = self.cpu = self.pinned = 0
        self.gpu_diff = 0

    @classmethod
    def instance(cls) -> MemoryCounters:
        """The single object of this process."""
        with _lock:
            cls._the_one = cls._the_one or cls()
            return cls._the_one

    def add_gpu(self, num_bytes: int) -> None:
        """`num_bytes` were obtained, or freed if negative."""
        with _lock:
            self.gpu += num_bytes
            self.gpu_diff = num_bytes

    def __repr__(self) -> str:
        return f"MemoryCounters(gpu={self.gpu}, cpu={self.cpu}, pinned={self.pinned})"
