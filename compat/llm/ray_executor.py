"""RayExecutor: the engine's replicas are actors of a Ray cluster (docs/design/replicas.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compat.llm.worker import GenerationExecutorProxy


class RayExecutor(GenerationExecutorProxy):
    """The executor of `LLM(orchestrator_type="ray")`."""

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of each worker, and return one value for each: of all ranks of a replica, one replica after the other.

        A worker has `rank()`, `node_id()` (Ray's), `pid()` and `address()`. Raises AttributeError for another method.
        """
        from backend.replicas.ray_engine import call_replicas

        number = self.hello.config.workers.replicas
        return call_replicas(self.engine_executor.socket_path, number, method, tuple(args), dict(kwargs or {}))
