"""Runs prompts through the whole engine, and records the logits behind each sampled token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from backend.api import EngineConfig, OutputConfig, Request
from backend.api.config.kv_bits import named
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.core.step import Row
from backend.engine.core import EngineCore
from backend.scheduler.plan import StepPlan
from backend.worker.group import InProcessWorkerGroup
from backend.worker.input_batch import InputBatch
from backend.worker.state_storage import StateStorage
from backend.worker.tier import KVBlock, Tier
from tests.model.tiers import NATIVE, TORCH, TierCase

NEAR_TIE = 1e-4  # two best logits closer than this: either token is right
BLOCK = {TORCH: 8, NATIVE: 32}


@dataclass
class Recording:
    """What one request produced: tokens, and the logits each was chosen from."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class RecordingTier:
    """Passes everything on, and tells of the logits [vocab] of each slot that samples."""

    def __init__(self, tier: Tier, record: Callable[[int, Tensor], None]) -> None:
        self.name, self.adapters = tier.name, tier.adapters
        self._tier = tier
        self._record = record

    def kv_block(self) -> KVBlock:
        return self._tier.kv_block()

    def run(
        self,
        batch: InputBatch,
        rows: list[Row],
        num_logits: Sequence[int],
        pools: list[Tensor],
        wants_logits: bool,
        outputs: dict[str, Tensor] | None = None,
        states: StateStorage | None = None,
    ) -> tuple[NDArray[np.int64] | None, Tensor | None]:
        greedy, logits = self._tier.run(batch, rows, num_logits, pools, True, outputs, states)
        slots = [row.slot for row, count in zip(rows, num_logits) if count]
        for slot, of_slot in zip(slots, logits, strict=True):
            self._record(slot, of_slot.clone())
        return greedy, logits


class RecordingEngine:
    """An EngineCore over the real worker group; logits are copied on their way to the sampler."""

    def __init__(self, config: EngineConfig, workers: InProcessWorkerGroup) -> None:
        self.core = EngineCore(config, workers)
        workers.runner.tier = RecordingTier(workers.runner.tier, self._record)
        self._recordings: dict[int, Recording] = {}
        self._next_id = 1

    @classmethod
    def of_transformers(
        cls, hf: PreTrainedModel, tier: TierCase, max_num_tokens: int, kv: str = "auto"
    ) -> RecordingEngine:
        """An engine in float32, on one thread, over a model of transformers."""
        config = EngineConfig(
            ModelConfigSection(dtype="float32", kernels=tier.kernels, num_threads=1, device="cpu"),
            KvCacheConfig(block_size=BLOCK[tier], max_tokens=BLOCK[tier] * 400, **named(kv)),
            SchedulerConfig(max_batch_size=8, max_num_tokens=max_num_tokens, policy="max_utilization"),
        )
        workers = InProcessWorkerGroup.from_buffers(
            hf.state_dict(), hf.config.to_json_string(), config.model, config.scheduler, config.kv_cache
        )
        return cls(config, workers)

    def start(self, prompt: Sequence[int], max_tokens: int, **fields: object) -> Recording:
        recording = self._recordings[self._next_id] = Recording(list(prompt))
        output = OutputConfig(exclude_input_from_output=True)
        self.core.begin_poll()
        self.core.enqueue(self._next_id, Request(list(prompt), max_tokens, output_config=output, **fields))
        self._next_id += 1
        return recording

    def run(self, evict_every: int | None = None) -> None:
        """Step until all is done; every `evict_every` steps everybody is paused and loses all KV."""
        for step in range(10_000):
            if not self.core.has_work:
                return
            if evict_every and step % evict_every == evict_every - 1:
                self.evict_everybody()
            for response in self.core.step():
                assert not response.has_error(), response.error_msg
                self._recordings[response.request_id].tokens += response.result.output_token_ids[0]
            self.core.check_integrity()
        raise AssertionError("the engine does not come to an end")

    def evict_everybody(self) -> None:
        """Pause all that run, through a plan and a commit, and throw all cached KV away."""
        plan = StepPlan(self.core.kv.plan())
        for seq in reversed(self.core.scheduler.running):
            plan.kv.pause(seq)
        self.core.scheduler.commit(plan, step_id=-1, now_ns=0)
        self.core.kv.lose_everything()

    def _record(self, slot: int, logits: Tensor) -> None:
        request_id = next(seq.request_id for seq in self.core.scheduler.running if seq.slot == slot)
        self._recordings[request_id].logits.append(logits)


@torch.inference_mode()
def excused_ties(hf: PreTrainedModel, recording: Recording, history: Sequence[int] = ()) -> int:
    """Check a recording against transformers: logits within 1e-4, each token the best one. Returns the near ties excused."""
    ids = [*history, *recording.prompt, *recording.tokens]
    first = len(ids) - len(recording.tokens) - 1
    expected = hf(torch.tensor([ids])).logits[0, first:-1].float()
    measured = torch.stack(recording.logits)
    difference = (expected - measured).abs().max().item()
    assert difference <= 1e-4, f"logits differ by {difference:.2e}"
    best = expected.topk(2).values
    ties = 0
    for position, token in enumerate(recording.tokens):
        if expected[position].argmax().item() != token:
            assert best[position, 0] - best[position, 1] < NEAR_TIE, f"token {position} differs from transformers'"
            ties += 1
    return ties


def load_default() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained("models/default", dtype=torch.float32).eval()
