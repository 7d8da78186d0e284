"""An engine over a real checkpoint whose requests may ask for tensors, driven step by step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.api import EngineConfig, OutputConfig, Request, Response, TensorData
from backend.api.config.schema import KvCacheConfig, LimitsConfig, ModelConfigSection, RecordsConfig, SchedulerConfig
from backend.engine.core import EngineCore
from backend.scheduler.plan import StepPlan
from backend.worker.debug_tensors import DebugFetch
from backend.worker.group import InProcessWorkerGroup
from backend.worker.post_processors import PostProcessors
from tests.model.tiers import TierCase


def engine_config(directory: Path, tier: TierCase, reuse: bool = True, **sections: Any) -> EngineConfig:
    """`sections`: fields of `model`, `scheduler`, `limits` and `records`, each as a dict."""
    model = dict(gather_context_logits=True, gather_generation_logits=True) | sections.get("model", {})
    return EngineConfig(
        ModelConfigSection(
            path=str(directory), dtype="float32", kernels=tier.kernels, device="cpu", num_threads=1, **model
        ),
        KvCacheConfig(block_size=tier.block, max_tokens=tier.block * 40, enable_block_reuse=reuse, watermark=0.0),
        SchedulerConfig(**{"max_batch_size": 4, "max_num_tokens": 64} | sections.get("scheduler", {})),
        LimitsConfig(**sections.get("limits", {})),
        records=RecordsConfig(**sections.get("records", {})),
    )


EVICTIONS = {n * (n + 3) // 2 for n in range(1, 40)}  # before these steps: 2, 5, 9, 14, ...


class Engine:
    """Keeps the responses of each request."""

    def __init__(self, config: EngineConfig, processors: PostProcessors | None = None) -> None:
        self.workers = InProcessWorkerGroup(
            config.model, config.scheduler, config.kv_cache, processors=processors, debug=DebugFetch.of(config)
        )
        self.core = EngineCore(config, self.workers)
        self.responses: dict[int, list[Response]] = {}
        self._ids = itertools.count(1)

    def ask(self, prompt: list[int], max_tokens: int, output: OutputConfig | None = None, **fields: Any) -> int:
        request_id = next(self._ids)
        config = output or OutputConfig(return_context_logits=True, return_generation_logits=True)
        self.core.begin_poll()
        self.core.enqueue(request_id, Request(list(prompt), max_tokens, output_config=config, **fields))
        self._collect(self.core.take_responses())
        return request_id

    def run(self, evict: bool = False) -> None:
        """Step until all is done. `evict`: everybody is paused and loses all KV now and then, at ever longer intervals."""
        for step in range(1000):
            if not self.core.has_work:
                return
            if evict and step in EVICTIONS:
                plan = StepPlan(self.core.kv.plan())
                for seq in reversed(self.core.scheduler.running):
                    plan.kv.pause(seq)
                self.core.scheduler.commit(plan, step_id=-1, now_ns=0)
                self.core.kv.lose_everything()
            self._collect(self.core.step())
            self.core.check_integrity()
        raise AssertionError("the engine does not come to an end")

    def answer(self, prompt: list[int], max_tokens: int, output: OutputConfig | None = None, **fields: Any) -> Response:
        """The final response of a request that runs alone."""
        request_id = self.ask(prompt, max_tokens, output, **fields)
        self.run()
        return self.responses[request_id][-1]

    def tokens(self, request_id: int, prompt: list[int]) -> list[int]:
        """Output tokens of a request that does not stream."""
        return self.responses[request_id][-1].result.output_token_ids[0][len(prompt) :]

    def _collect(self, responses: list[Response]) -> None:
        for response in responses:
            self.responses.setdefault(response.request_id, []).append(response)


def tensor_of(data: TensorData | None) -> Tensor:
    assert data is not None and data.dtype == "float32"
    return torch.frombuffer(bytearray(data.data), dtype=torch.float32).reshape(data.shape)
