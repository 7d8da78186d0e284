"""What an admission costs beside thousands of cached conversations that all begin with one template.

Part of `bench scheduling`. Every conversation is TEMPLATE_TOKENS that all share and OWN_TOKENS of its own, so each is another
continuation of the same cached block: a lookup that walked them all would cost the more, the more there are.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from rich.table import Table

from backend.api import EngineConfig, Request
from backend.api.config.schema import KvCacheConfig, SchedulerConfig
from backend.core.step import WorkerGroup
from backend.engine.core import EngineCore

BLOCK_SIZE = 32
TEMPLATE_TOKENS = 97  # three blocks, and the first token of the fourth
OWN_TOKENS = 64
VOCAB = 32_000
BURST = 64
ALONE = 101


@dataclass
class AdmissionFigures:
    """CPU milliseconds from a request's arrival to its first token, on a null device."""

    conversations: int
    namespace: str  # "" = anonymous: whole blocks are shared; else per token
    alone_ms: float  # median of one newcomer at a time
    burst_ms: float  # all of BURST newcomers that come at once


def measure_admission(device: WorkerGroup, conversations: int, namespace: str) -> AdmissionFigures:
    core = _make_core(device, conversations)
    rng = random.Random(conversations)
    template = [rng.randrange(VOCAB) for _ in range(TEMPLATE_TOKENS)]

    def prompt() -> list[int]:
        return template + [rng.randrange(VOCAB) for _ in range(OWN_TOKENS)]

    for _ in range(0, conversations, BURST):
        _serve(core, [prompt() for _ in range(BURST)], namespace)
    alone = [_serve(core, [prompt()], namespace) for _ in range(ALONE)]
    burst = [_serve(core, [prompt() for _ in range(BURST)], namespace) for _ in range(5)]
    return AdmissionFigures(conversations, namespace, statistics.median(alone), statistics.median(burst))


def _make_core(device: WorkerGroup, conversations: int) -> EngineCore:
    num_newcomers = ALONE + 6 * BURST
    max_tokens = (conversations + num_newcomers + BURST) * (OWN_TOKENS + 2 * BLOCK_SIZE)
    config = EngineConfig(
        kv_cache=KvCacheConfig(block_size=BLOCK_SIZE, max_tokens=max_tokens),
        scheduler=SchedulerConfig(max_batch_size=BURST, max_num_tokens=16 * BURST, max_context_tokens=16 * BURST),
    )
    return EngineCore(config, device)


def _serve(core: EngineCore, prompts: list[list[int]], namespace: str) -> float:
    """CPU milliseconds until each of the prompts, which arrive together, has its one token."""
    started_ns = time.thread_time_ns()
    core.begin_poll()
    for request_id, prompt in enumerate(prompts):
        core.enqueue(request_id, Request(prompt, 1, cache_salt=namespace))
    while core.has_work:
        core.step()
    return (time.thread_time_ns() - started_ns) / 1e6


def admission_table(figures: list[AdmissionFigures]) -> Table:
    table = Table(title="CPU time from arrival to first token, ms, beside cached conversations under one template")
    for name in ("conversations", "shared", "one newcomer", f"{BURST} at once"):
        table.add_column(name, justify="right")
    for f in figures:
        shared = "per token" if f.namespace else "whole blocks"
        table.add_row(f"{f.conversations:,}", shared, f"{f.alone_ms:.2f}", f"{f.burst_ms:.1f}")
    return table
