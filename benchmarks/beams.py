"""What a step of beams costs beside a step with as many greedy rows, through the whole engine on the native tier.

    python -m benchmarks.beams                      a random Llama of about 200 M parameters in bfloat16, 4 beams
    python -m benchmarks.beams --width 8 --prompt 1000

Blocks of steps of both kinds alternate; the figures are medians over blocks, of wall-clock time per step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Annotated

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from backend.api import EngineConfig, Request, SamplingConfig
from backend.api.config import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.api.request import RequestId
from backend.engine.core import EngineCore
from backend.worker.group import InProcessWorkerGroup

SIZES = {
    "tiny": dict(hidden_size=256, intermediate_size=640, num_hidden_layers=6, num_attention_heads=8, vocab_size=4096),
    "200M": dict(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16, vocab_size=32000
    ),
}
STEPS = 16  # of a block


def make_core(size: str, width: int) -> EngineCore:
    torch.manual_seed(0)
    hf = LlamaForCausalLM(
        LlamaConfig(**SIZES[size], max_position_embeddings=4096, tie_word_embeddings=False)
    ).bfloat16()
    hf.config.architectures = [type(hf).__name__]
    config = EngineConfig(
        ModelConfigSection(dtype="bfloat16", kernels="native", device="cpu"),
        KvCacheConfig(max_tokens=32 * 1024),
        SchedulerConfig(max_batch_size=width),
    )
    workers = InProcessWorkerGroup.from_buffers(
        hf.state_dict(), hf.config.to_json_string(), config.model, config.scheduler, config.kv_cache
    )
    return EngineCore(config, workers)


class Batch:
    """`width` rows that generate, greedy or as beams, for as many steps as wanted."""

    def __init__(self, core: EngineCore, width: int, prompt: int, beams: bool) -> None:
        self._core, self._width, self._prompt, self._beams = core, width, [*range(prompt)], beams
        self._next_id = itertools.count(1 + 1_000_000 * beams)

    def seconds_per_step(self) -> float:
        """Of a block of steps that only generate; nothing is left of it afterwards."""
        count = 1 if self._beams else self._width
        sampling = SamplingConfig(beam_width=self._width if self._beams else 1)
        for row in range(count):
            request = Request([7 + row, *self._prompt], STEPS + 8, sampling_config=sampling)
            self._core.enqueue(RequestId(next(self._next_id)), request)
        while self._core.latest_iteration().num_gen_requests < self._width:
            self._core.step()
        self._core.step()
        started = time.perf_counter()
        for _ in range(STEPS):
            self._core.step()
        seconds = (time.perf_counter() - started) / STEPS
        while self._core.has_work:
            self._core.step()
        return seconds


def main(
    size: Annotated[str, typer.Option(help="Of the model: tiny or 200M.")] = "200M",
    width: Annotated[int, typer.Option(help="Beams, and greedy rows beside which they are measured.")] = 4,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 100,
    blocks: Annotated[int, typer.Option(help="Blocks of steps of each kind.")] = 15,
) -> None:
    core = make_core(size, width)
    greedy, beams = (Batch(core, width, prompt, has_beams) for has_beams in (False, True))
    figures = [(greedy.seconds_per_step(), beams.seconds_per_step()) for _ in range(blocks)]
    plain, searched = (statistics.median(column) * 1e3 for column in zip(*figures, strict=True))
    ratio = statistics.median(b / a for a, b in figures)
    print(
        f"{size}, {width} rows, {prompt} prompt tokens: greedy {plain:.2f} ms, beams {searched:.2f} ms a step, x {ratio:.3f}"
    )


if __name__ == "__main__":
    typer.run(main)
