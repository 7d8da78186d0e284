"""`python -m tests.parity.fidelity --minutes 60`: random lives of models, compared bit for bit with undisturbed ones.

Each seed takes a tiny model, most of them with recurrent layers, and a number of requests, some of which share prefixes or
go on from an answer. They run undisturbed first: one after the other, each prompt in one step, in a pool that is large and
shares nothing. Then they run at once in a small pool, with few snapshots, short chunks, drafts that are right or wrong,
pauses, and moments when everything is evicted. Tokens and their log-probabilities (float32) must be the same bits.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from backend.api import EngineConfig, OutputConfig, Request, SamplingConfig
from backend.api.config.kv_bits import named
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.engine.core import EngineCore
from backend.scheduler.plan import StepPlan
from backend.worker.group import InProcessWorkerGroup
from tests.families.tiny import VOCAB, make
from tests.native.harness import Format

MODELS = ("qwen3.5", "lfm2", "granite 4 hybrid", "qwen3.5 moe", "bamba", "nemotron-h", "deepseek v3")
FORMATS = (
    Format("bfloat16"),
    Format("bfloat16", "w8a8"),
    Format("bfloat16", "w4a8", kv="int4"),
    Format("float32", "int8", kv="int8"),
)
BLOCK = 32
Answer = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, log-probabilities


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingConfig


class Life:
    """An engine over a model, and the answers to its requests."""

    def __init__(self, directory: Path, form: Format, kv_cache: KvCacheConfig, **scheduler: object) -> None:
        config = EngineConfig(
            ModelConfigSection(
                path=str(directory), dtype=form.dtype, quantization=form.quantization, num_threads=1, device="cpu"
            ),
            kv_cache,
            SchedulerConfig(max_batch_size=4, policy="max_utilization", **scheduler),
        )
        self.core = EngineCore(config, InProcessWorkerGroup(config.model, config.scheduler, kv_cache))
        assert self.core.model.kernels == "native", "the bits of other tiers depend on the batch"
        self._answers: dict[int, tuple[list[int], list[float]]] = {}

    def ask(self, asked: Asked, drafts: list[int]) -> int:
        number = len(self._answers) + 1
        self._answers[number] = [], []
        output = OutputConfig(exclude_input_from_output=True, return_log_probs=True)
        self.core.begin_poll()
        self.core.enqueue(
            number,
            Request(
                list(asked.prompt),
                asked.max_tokens,
                sampling_config=asked.sampling,
                output_config=output,
                draft_tokens=drafts,
            ),
        )
        return number

    def step(self) -> None:
        for response in self.core.step():
            assert not response.has_error(), response.error_msg
            tokens, log_probs = self._answers[response.request_id]
            tokens += response.result.output_token_ids[0]
            log_probs += response.result.log_probs[0]
        self.core.check_integrity()

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def evict_everybody(self) -> None:
        plan = StepPlan(self.core.kv.plan())
        for seq in reversed(self.core.scheduler.running):
            plan.kv.pause(seq)
        self.core.scheduler.commit(plan, step_id=-1, now_ns=0)
        self.core.kv.lose_everything()

    def pause_somebody(self, rng: random.Random) -> None:
        running = self.core.scheduler.running
        if running:
            plan = StepPlan(self.core.kv.plan())
            plan.kv.pause(rng.choice(running))
            self.core.scheduler.commit(plan, step_id=-1, now_ns=0)

    def answer(self, number: int) -> Answer:
        tokens, log_probs = self._answers[number]
        return tuple(tokens), tuple(log_probs)


def requests_of(rng: random.Random) -> list[Asked]:
    common = [rng.randrange(VOCAB) for _ in range(rng.randint(20, 150))]
    asked = []
    for _ in range(rng.randint(3, 7)):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        prompt = common[: rng.choice((0, len(common) // 2, len(common)))] + own
        sampling = SamplingConfig(temperature=rng.choice((None, 0.7)), seed=rng.randrange(1000))
        asked.append(Asked(tuple(prompt), rng.randint(1, 40), sampling))
    return asked


def undisturbed(directory: Path, form: Format, rng: random.Random) -> list[tuple[Asked, Answer]]:
    """Requests with their answers; some go on from the answer of another one."""
    kv_cache = KvCacheConfig(max_tokens=BLOCK * 100, enable_block_reuse=False, snapshots=0, **named(form.kv))
    life = Life(directory, form, kv_cache, max_num_tokens=1024, max_context_tokens=1024)
    left, done = requests_of(rng), []
    while left:
        asked = left.pop()
        number = life.ask(asked, [])
        life.run()
        tokens, _ = answer = life.answer(number)
        done.append((asked, answer))
        longer = (*asked.prompt, *tokens, *(rng.randrange(VOCAB) for _ in range(5)))
        if rng.random() < 0.6 and len(longer) < 250:
            left.append(Asked(longer, rng.randint(1, 30), asked.sampling))
    return done


def drafts_of(rng: random.Random, tokens: tuple[int, ...]) -> list[int]:
    """None for half of the requests; else the answer, here and there a token is wrong."""
    if rng.random() < 0.5:
        return []
    wrong = rng.choice((0.0, 0.1, 0.5))
    return [rng.randrange(VOCAB) if rng.random() < wrong else token for token in tokens]


def disturbed(
    directory: Path, form: Format, asked: list[tuple[Asked, Answer]], rng: random.Random, seen: Counter[str]
) -> list[Answer]:
    kv_cache = KvCacheConfig(
        max_tokens=BLOCK * rng.randint(10, 20),
        watermark=0.0,
        sharing=rng.choice(("all", "namespace")),
        snapshots=rng.choice((0, 1, 3, 8, 40)),
        snapshot_interval=BLOCK * rng.randint(0, 3),
        **named(form.kv),
    )
    life = Life(directory, form, kv_cache, max_num_tokens=rng.choice((7, 33, 64, 200)))
    left, numbers = asked[::-1], []
    while left or life.core.has_work:
        if left and rng.random() < 0.4:
            each, (tokens, _) = left.pop()
            numbers.append(life.ask(each, drafts_of(rng, tokens)))
        elif rng.random() < 0.02:
            life.evict_everybody()
            seen["evictions"] += 1
        elif rng.random() < 0.03:
            life.pause_somebody(rng)
        life.step()
    states, counters = life.core.kv.states, life.core.counters
    if states is not None:
        seen.update(
            restored=states.num_restored_total,
            snapshots=states.num_saved_total,
            snapshots_evicted=states.num_evicted_total,
        )
    seen.update(
        drafts_accepted=counters.accepted_draft_tokens_total,
        drafts_rejected=counters.draft_tokens_total - counters.accepted_draft_tokens_total,
        pauses=counters.pauses_total,
        tokens_recomputed=counters.recomputed_tokens_total,
        tokens=counters.generated_tokens_total,
    )
    return [life.answer(number) for number in numbers]


def differing(directory: Path, form: Format, seed: int, seen: Counter[str]) -> int:
    """Answers of a seed that differ in a bit."""
    rng = random.Random(seed)
    asked = undisturbed(directory, form, rng)
    seen.update(lives=1, requests=len(asked))
    answers = disturbed(directory, form, asked, rng, seen)
    return sum(one != expected for one, (_, expected) in zip(answers, asked, strict=True))


def main(minutes: Annotated[float, typer.Option(help="How long.")] = 1.0, start: int = 0) -> None:
    """Run random lives until the time is over, and print what they met. Exit status 1 where a bit differs."""
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    num_differing, end = 0, time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as directory:
        models = {name: make(Path(directory) / str(index), name, "bfloat16") for index, name in enumerate(MODELS)}
        for seed in itertools.count(start):
            if time.monotonic() > end:
                break
            name, form = MODELS[seed % len(MODELS)], FORMATS[seed // len(MODELS) % len(FORMATS)]
            found = differing(models[name], form, seed, seen)
            if found:
                print(f"seed {seed}, {name}, {form}: {found} answers differ", flush=True)
            num_differing += found
    print(f"{num_differing} answers differ; met: " + ", ".join(f"{count:,} {what}" for what, count in seen.items()))
    sys.exit(bool(num_differing))


if __name__ == "__main__":
    typer.run(main)
