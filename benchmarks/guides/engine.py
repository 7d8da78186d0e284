"""An engine in this process, driven step by step, for measurements."""

from __future__ import annotations

import time
from pathlib import Path

from backend.api import EngineConfig, Request
from backend.api.config.schema import GuidedConfig, KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.api.request import RequestId
from backend.api.response import Response
from backend.engine.core import EngineCore
from backend.worker.group import InProcessWorkerGroup


class Bench:
    def __init__(self, model: str, rows: int, max_tokens: int) -> None:
        """`max_tokens`: of the pool."""
        self.config = EngineConfig(
            model=ModelConfigSection(path=str(Path(model))),
            scheduler=SchedulerConfig(max_batch_size=rows, max_num_tokens=max(1024, rows)),
            kv_cache=KvCacheConfig(max_tokens=max_tokens),
        )
        section = self.config.model
        workers = InProcessWorkerGroup(section, self.config.scheduler, self.config.kv_cache, guided=GuidedConfig())
        self.core = EngineCore(self.config, workers)
        self._next_id = 0

    def send(self, request: Request) -> RequestId:
        self._next_id += 1
        self.core.begin_poll()
        self.core.enqueue(RequestId(self._next_id), request)
        return RequestId(self._next_id)

    def settle(self) -> None:
        """Wait until all guides are compiled."""
        while self.core.preparation:
            self.core.admit()
            time.sleep(0.001)

    def turn(self) -> list[Response]:
        """One step, or a short wait for guides."""
        self.core.admit()
        if not self.core.has_work:
            time.sleep(0.001)
            return self.core.take_responses()
        return self.core.step()
