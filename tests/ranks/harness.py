"""Engines over several ranks, and the logits and tokens of what they run."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backend.api import ConfigError, EngineConfig, SamplingConfig
from backend.api.config.kv_bits import named
from backend.api.config.schema import (
    KvCacheConfig,
    LoraSection,
    ModelConfigSection,
    SchedulerConfig,
    SpeculationConfig,
    WorkersConfig,
)
from backend.executor.load import workers_of
from backend.worker import rank_process
from tests.families.tiny import VOCAB
from tests.native.harness import Format, prompt
from tests.parity.scenario import RecordingEngine

NUM_TOKENS = 10
PROMPTS = [prompt(length, VOCAB, seed=length) for length in (5, 41, 77)]
FLOAT32 = Format()


class ThreadFollower:
    """A RankFollower (backend/worker/rank_followers.py) whose rank is a thread of this process."""

    pid = os.getpid()

    def __init__(self, rank: int, on_end: Callable[[int], None]) -> None:
        self.rank, self._on_end = rank, on_end
        self.socket, self._other_end = socket.socketpair()
        self.end = "does not answer"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def who(self) -> str:
        return "a thread"

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self.socket.close()
        self._thread.join(30)
        assert not self._thread.is_alive(), f"rank {self.rank} does not end with its socket"

    def _run(self) -> None:
        try:
            with self._other_end:
                rank_process.serve(self._other_end)
        except (EOFError, ConnectionError, ConfigError):  # as in rank_process.main
            pass
        finally:
            self._on_end(self.rank)


@dataclass
class Ran:
    tokens: list[list[int]]
    logits: list[Tensor]  # of each request [tokens, vocab]


def engine_config(
    directory: Path,
    size: int,
    form: Format = FLOAT32,
    max_num_tokens: int = 512,
    lora: LoraSection = LoraSection(),  # noqa: B008 (immutable)
    speculation: SpeculationConfig = SpeculationConfig(),  # noqa: B008 (immutable)
    stages: int = 1,
    micro_batches: int = 1,
) -> EngineConfig:
    """size: ranks of a stage. Every rank has one thread, or where stages take turns as many as there are stages."""
    return EngineConfig(
        ModelConfigSection(
            path=str(directory),
            dtype=form.dtype,
            kernels="native",
            quantization=form.quantization,
            num_threads=size * stages,
            device="cpu",
        ),
        KvCacheConfig(block_size=32, max_tokens=32 * 100, **named(form.kv)),
        SchedulerConfig(max_batch_size=8, max_num_tokens=max_num_tokens, policy="max_utilization"),
        lora=lora,
        speculation=speculation,
        workers=WorkersConfig(size, stages, micro_batches, rank_timeout_s=120.0),
    )


def run(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    evict_every: int | None = None,
    num_tokens: int = NUM_TOKENS,
    **fields: object,
) -> Ran:
    """Run the prompts together. The first is greedy, the others are sampled. `fields`: of all requests."""
    workers = workers_of(config)
    try:
        engine = RecordingEngine(config, workers)
        recordings = [
            engine.start(
                each,
                num_tokens,
                sampling_config=SamplingConfig(temperature=1.0, seed=seed) if seed else SamplingConfig(),
                **fields,
            )
            for seed, each in enumerate(prompts)
        ]
        while engine.core.preparation:  # adapters are read on other threads
            time.sleep(0.005)
            engine.core.admit()
        engine.run(evict_every)
    finally:
        workers.shutdown()
    return Ran([each.tokens for each in recordings], [torch.stack(each.logits) for each in recordings])


def run_in_turns(configs: Sequence[EngineConfig], tokens: Sequence[int], num_tokens: int) -> list[list[int]]:
    """What an engine of each configuration answers, when all of them step in turns in this process."""
    groups = [workers_of(config) for config in configs]
    try:
        engines = [RecordingEngine(config, group) for config, group in zip(configs, groups, strict=True)]
        recordings = [engine.start(tokens, num_tokens) for engine in engines]
        while any(engine.core.has_work for engine in engines):
            for engine, recording in zip(engines, recordings, strict=True):
                for response in engine.core.step():
                    recording.tokens += response.result.output_token_ids[0]
    finally:
        for group in groups:
            group.shutdown()
    return [recording.tokens for recording in recordings]
