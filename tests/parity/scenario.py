"""Runs prompts through the whole engine in float32, and records the logits behind each sampled token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from backend.api import EngineConfig, OutputConfig, Request
from backend.api.config import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.engine.core import EngineCore
from backend.sampling.sampler import Sampler
from backend.scheduler.scheduler import StepPlan
from backend.worker.group import InProcessWorkerGroup

NEAR_TIE = 1e-4  # two best logits closer than this: either token is right
BLOCK = 8


@dataclass
class Recording:
    """What one request produced: tokens, and the logits each was chosen from."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class RecordingEngine:
    """An EngineCore over the real worker group; logits are copied on their way into the Sampler."""

    def __init__(self, hf: PreTrainedModel, monkeypatch, max_num_tokens: int, policy: str = "max_utilization"):
        section = ModelConfigSection(dtype="float32", num_threads=1)
        scheduler = SchedulerConfig(max_batch_size=8, max_num_tokens=max_num_tokens, policy=policy)
        config = EngineConfig(section, KvCacheConfig(block_size=BLOCK, max_tokens=BLOCK * 400), scheduler)
        workers = InProcessWorkerGroup.from_buffers(hf.state_dict(), hf.config.to_json_string(), section, scheduler)
        self.core = EngineCore(config, workers)
        self._recordings: dict[int, Recording] = {}
        self._next_id = 1
        original = Sampler.sample

        def sample(sampler, logits, slots, token_ids, num_tokens):
            by_slot = {seq.slot: seq.request_id for seq in self.core.scheduler.running}
            for slot, row in zip(slots, logits, strict=True):
                self._recordings[by_slot[slot]].logits.append(row.clone())
            return original(sampler, logits, slots, token_ids, num_tokens)

        monkeypatch.setattr(Sampler, "sample", sample)

    def start(self, prompt: list[int], max_tokens: int, **fields: object) -> Recording:
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


@torch.inference_mode()
def excused_ties(hf: PreTrainedModel, recording: Recording, history: list[int] = ()) -> int:
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
