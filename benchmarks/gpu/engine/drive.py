"""Drives an EngineCore in this process: a steady batch that decodes, and one that decodes while prompts keep arriving."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from backend.api.config.file import load_config
from backend.api.config.schema import EngineConfig
from backend.api.request import Request, RequestId
from backend.api.sampling import SamplingConfig
from backend.engine.core import EngineCore
from backend.worker.group import InProcessWorkerGroup
from benchmarks.gpu.engine.waits import host_clock
from benchmarks.gpu.engine.weights import Format, RandomTensors, Shape, config_json


class Load(NamedTuple):
    """What the engine is given."""

    context: int  # tokens of a row, at the end of what is measured
    warm_steps: int
    steps: int  # measured
    mixed_rows: int
    mixed_steps: int
    shortest: int  # prompt that arrives
    longest: int
    waiting: int  # prompts that are always there to be read
    settings: tuple[str, ...]  # section.key=value


FULL = Load(1024, 20, 100, 64, 300, 512, 4096, 2, (
    "kv_cache.block_size=64", "kv_cache.max_tokens=460000", "scheduler.max_batch_size=256", "scheduler.max_num_tokens=8192",
    "scheduler.mixed_context_tokens=1024", "model.max_seq_len=8192",
))  # fmt: skip
SMALL = Load(40, 3, 8, 3, 12, 20, 60, 2, (
    "kv_cache.block_size=32", "kv_cache.max_tokens=8192", "scheduler.max_batch_size=8", "scheduler.max_num_tokens=64",
    "scheduler.mixed_context_tokens=16", "model.max_seq_len=512",
    "model.num_threads=1",
))  # fmt: skip
ANSWER_TOKENS = 1  # output of a prompt that arrives, so that a prompt is always being read


class Decoded(NamedTuple):
    tokens_s: float
    step_ms: float
    host_ms: float
    context: float  # mean of the measured steps


class Mixed(NamedTuple):
    p50_ms: float  # between two tokens of a running row
    p99_ms: float
    prefill_tokens_s: float
    decode_tokens_s: float


class Engine:
    def __init__(self, shape: Shape, format: Format, load: Load, device: torch.device, kernels: str = "auto") -> None:
        """Raises ConfigError when the engine cannot serve such a model."""
        self.load = load
        settings = [
            *load.settings,
            f"kv_cache.dtype={format.kv_dtype}",
            f"model.device={device}",
            f"model.kernels={kernels}",
        ]
        settings += ["model.dtype=bfloat16", "kv_cache.enable_block_reuse=false"]
        config: EngineConfig = load_config(None, settings)
        tensors = RandomTensors(shape, format, device)
        self.workers = InProcessWorkerGroup.from_buffers(
            tensors, config_json(shape, format), config.model, config.scheduler, config.kv_cache
        )
        self.core = EngineCore(config, self.workers)
        gc.collect()
        gc.freeze()  # the engine's own process does the same
        gc.set_threshold(20_000)
        self._vocab = shape.vocab
        self._random = np.random.default_rng(0)
        self._ids = itertools.count(1)

    def close(self) -> None:
        self.workers.shutdown()
        gc.unfreeze()  # the collector shall find what is left of the engine

    def decode(self, batch: int) -> Decoded:
        """`batch` rows that only generate."""
        load = self.load
        with self.generating(batch):
            before, context = self.core.counters.generated_tokens_total, self._mean_context()
            with host_clock() as clock:
                clock.restart()
                began = time.perf_counter()
                for _ in range(load.steps):
                    self.step()
                took = time.perf_counter() - began
                host_ms = clock.elapsed_ms() / load.steps
            tokens = self.core.counters.generated_tokens_total - before
            context = (context + self._mean_context()) / 2
        if tokens < load.steps * batch:
            raise RuntimeError(f"{tokens} tokens came in {load.steps} steps of {batch} rows")
        return Decoded(tokens / took, 1000 * took / load.steps, host_ms, context)

    @contextmanager
    def generating(self, batch: int) -> Iterator[None]:
        """`batch` rows that generate for `load.steps` steps, warm; they are cancelled at the end."""
        load = self.load
        # Nobody passes load.context, where the engine may go over to a graph for longer rows.
        prompt = max(1, load.context - load.warm_steps - load.steps - batch // 6 - 4)
        # The first rows generate while the last ones' prompts are read: for at most as many steps as there are rows.
        self._start(batch, prompt, load.warm_steps + load.steps + 2 * batch + 8)
        self._until_all_generate(batch)
        for _ in range(load.warm_steps):
            self.step()
        yield
        self._end()

    def mixed(self) -> Mixed:
        """Rows that generate, while prompts of many lengths keep arriving: as soon as one has been answered, the next."""
        load = self.load
        prompts = self._prompt_lengths()
        self._start(load.mixed_rows, load.context, 2 * (load.warm_steps + load.mixed_steps) + 100)
        self._until_all_generate(load.mixed_rows)
        gaps: list[float] = []
        counters = self.core.counters
        for step in range(load.warm_steps + load.mixed_steps):
            if step == load.warm_steps:
                tokens, context, began = (
                    counters.generated_tokens_total,
                    counters.context_tokens_total,
                    time.perf_counter(),
                )
            while self.core.num_live < load.mixed_rows + load.waiting:
                self._enqueue(next(prompts), ANSWER_TOKENS)
            start = time.perf_counter()
            self.step()
            if step >= load.warm_steps:
                gaps.append(1000 * (time.perf_counter() - start))
        took = time.perf_counter() - began
        generated, read = counters.generated_tokens_total - tokens, counters.context_tokens_total - context
        self._end()
        p50, p99 = np.percentile(gaps, (50, 99))
        return Mixed(float(p50), float(p99), read / took, generated / took)

    def _mean_context(self) -> float:
        running = self.core.scheduler.running
        return sum(seq.num_tokens for seq in running) / len(running)

    def _prompt_lengths(self) -> Iterator[int]:
        while True:
            yield int(self._random.integers(self.load.shortest, self.load.longest + 1))

    def _start(self, rows: int, prompt: int, new: int) -> None:
        for _ in range(rows):
            self._enqueue(prompt, new)

    def _enqueue(self, prompt: int, new: int) -> None:
        ids = self._random.integers(0, self._vocab, prompt).tolist()
        request = Request(ids, new, streaming=True, sampling_config=SamplingConfig())
        self.core.enqueue(RequestId(next(self._ids)), request)

    def _until_all_generate(self, rows: int) -> None:
        """Until every row has had its first token."""
        waiting = set(self.core.live_ids())
        if len(waiting) != rows:
            raise RuntimeError(f"{rows} requests were sent, {len(waiting)} accepted")
        while waiting:
            waiting -= {response.request_id for response in self.step()}

    def step(self) -> list[Any]:
        responses = self.core.step()
        failed = next((response for response in responses if response.has_error()), None)
        if failed is not None:
            raise RuntimeError(f"a request failed: {failed.error_msg}")
        return responses

    def _end(self) -> None:
        """Leave the engine empty."""
        for request_id in self.core.live_ids():
            self.core.cancel(request_id)
        while self.core.has_work:
            self.step()
