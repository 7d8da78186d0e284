"""What LoRA adapters cost a step that generates, beside the same rows without any, through the whole engine on the native tier.

    python -m benchmarks.lora                       shape L with random weights in bfloat16, 32 rows, 8 adapters of rank 16
    python -m benchmarks.lora --shape M --rank 64   another size, another rank
    python -m benchmarks.lora --model-dir DIR       your checkpoint
    python -m benchmarks.lora --storm 200           200 requests of 40 adapters of ranks 4 to 64, for about ten of which the host
                                                    cache has room: adapters in pages beside adapters in memory of their own

Blocks of steps of both kinds alternate; the figures are medians over blocks, of wall-clock time per step.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from backend.api import EngineConfig, Request
from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection, SchedulerConfig
from backend.api.lora import LoraConfig
from backend.api.request import RequestId
from backend.api.tensor import TensorData
from backend.architectures.description import ModelConfig
from backend.engine.core import EngineCore
from backend.models.config import read_model_config
from backend.models.lora import MODULES, Layers, places
from backend.worker.adapters import AdapterReader
from backend.worker.group import InProcessWorkerGroup
from kernels.cpu.lora import PackedAdapter
from tools.make_random_model import make_random_model

STEPS = 8  # of a block
PROMPT = 16  # tokens


def random_adapter(config: ModelConfig, task_id: int, rank: int) -> LoraConfig:
    """All seven projections of all layers, as a request brings them."""
    generator = np.random.default_rng(task_id)
    known = places(config)
    rows, table = [], []
    for layer in range(config.num_layers):
        for module in range(1, len(MODULES)):
            place = known[MODULES[module]]
            rows.append(generator.standard_normal(rank * (place.k + place.n), dtype=np.float32).astype("<f2") * 0.01)
            table.append((module, layer, rank))
    weights = np.zeros((len(rows), max(map(len, rows))), dtype="<f2")
    for row, values in zip(weights, rows, strict=True):
        row[: len(values)] = values
    return LoraConfig(task_id, TensorData("float16", weights.shape, weights.tobytes()), tuple(table))


class Bench:
    def __init__(self, directory: Path, rows: int, adapters: int, rank: int) -> None:
        config = EngineConfig(
            ModelConfigSection(path=str(directory), kernels="native", device="cpu"),
            KvCacheConfig(max_tokens=rows * 128, enable_block_reuse=False),
            SchedulerConfig(max_batch_size=rows),
            lora=LoraSection(enabled=True, max_rank=max(64, rank), host_bytes=8 << 30),
        )
        workers = InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache, lora=config.lora)
        self._core, self._rows, self._adapters = EngineCore(config, workers), rows, adapters
        self._ids = itertools.count(1)
        model = read_model_config(directory)
        for task_id in range(adapters):
            prepared = workers.prepare_adapter(random_adapter(model, task_id, rank))
            assert self._core.scheduler.adapters.put(("", task_id), prepared)
        self.adapter_bytes = self._core.scheduler.adapters.host.num_bytes

    def seconds_per_step(self, has_adapters: bool) -> float:
        """Of a block of steps that only generate; nothing is left of it afterwards."""
        core = self._core
        for row in range(self._rows):
            lora = LoraConfig(row % self._adapters) if has_adapters else None
            core.enqueue(RequestId(next(self._ids)), Request([7 + row] * PROMPT, STEPS + 4, lora=lora))
        while core.latest_iteration().num_gen_requests < self._rows:
            for response in core.step():
                assert not response.has_error(), response.error_msg
        core.step()
        started = time.perf_counter()
        for _ in range(STEPS):
            core.step()
        seconds = (time.perf_counter() - started) / STEPS
        while core.has_work:
            core.step()
        return seconds


class Storm:
    """Requests of more adapters than the host cache holds: one that is not there comes with its weights."""

    RANKS = (4, 8, 16, 32, 64)
    ADAPTERS = 40

    def __init__(self, directory: Path, in_pages: bool) -> None:
        model = read_model_config(directory)
        self._adapters = [random_adapter(model, task_id, self.RANKS[task_id % 5]) for task_id in range(self.ADAPTERS)]
        config = EngineConfig(
            ModelConfigSection(path=str(directory), kernels="native", device="cpu"),
            KvCacheConfig(max_tokens=8192, enable_block_reuse=False),
            SchedulerConfig(max_batch_size=8),
            lora=LoraSection(enabled=True, host_bytes=sum(len(each.weights.data) for each in self._adapters[:10])),
        )
        self._workers = InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache, lora=config.lora)
        self._core = EngineCore(config, self._workers)
        if not in_pages:
            self._hold_whole()

    def _hold_whole(self) -> None:
        loaded = self._workers._ready

        def pack(layers: Layers) -> tuple[object, int, int]:
            packed = PackedAdapter(layers, loaded.model.dtype)
            return packed, packed.num_bytes, packed.num_bytes

        self._workers._adapter_reader = AdapterReader(loaded.projections, loaded.dtype, 64, pack)
        self._core.preparation._reading._prepare = self._workers.prepare_adapter

    def run(self, num_requests: int, seed: int) -> tuple[float, float, float]:
        """Seconds, the share of requests whose adapter was held, and adapters held at the end."""
        choices = np.random.default_rng(seed).zipf(1.2, num_requests) % self.ADAPTERS
        held, core = 0, self._core
        started = time.perf_counter()
        for number, task_id in enumerate(map(int, choices)):
            is_held = ("", task_id) in core.adapters._names
            held += is_held
            lora = LoraConfig(task_id) if is_held else self._adapters[task_id]
            core.enqueue(RequestId(seed * num_requests + number), Request([7] * PROMPT, 4, lora=lora))
            while core.num_live >= 8 or (number == num_requests - 1 and core.num_live):
                for response in core.step():
                    assert not response.has_error(), response.error_msg
        return time.perf_counter() - started, held / num_requests, len(core.adapters.host)


def storm(directory: Path, num_requests: int, blocks: int) -> None:
    kinds = {"in pages": Storm(directory, True), "whole": Storm(directory, False)}
    runs = {kind: [each.run(num_requests, 0)][:0] for kind, each in kinds.items()}  # the first one warms up
    for seed in range(1, blocks + 1):
        for kind, each in kinds.items():
            runs[kind].append(each.run(num_requests, seed))
    for kind, figures in runs.items():
        seconds, found, held = (statistics.median(column) for column in zip(*figures, strict=True))
        print(
            f"{kind}: {num_requests / seconds:.1f} requests a second, {found:.0%} found theirs, {held:.0f} held at the end"
        )
    ratio = statistics.median(b[0] / a[0] for a, b in zip(runs["in pages"], runs["whole"], strict=True))
    print(f"in pages {ratio:.2f} times as fast as whole, the median of {blocks} runs of both in turn")


def main(
    shape: Annotated[str, typer.Option(help="Of the random model: S, M or L.")] = "L",
    model_dir: Annotated[Path | None, typer.Option(help="A checkpoint instead.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of the batch.")] = 32,
    adapters: Annotated[int, typer.Option(help="Adapters that take turns in the rows.")] = 8,
    rank: Annotated[int, typer.Option(help="Of each adapter.")] = 16,
    blocks: Annotated[int, typer.Option(help="Blocks of steps of each kind.")] = 7,
    storm_of: Annotated[int, typer.Option("--storm", help="Requests of a storm of adapters, instead.")] = 0,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = model_dir or make_random_model(Path(scratch) / shape, shape=shape)
        if storm_of:
            storm(directory, storm_of, blocks)
            return
        bench = Bench(directory, rows, adapters, rank)
        name = shape if model_dir is None else directory.name
    figures = [(bench.seconds_per_step(False), bench.seconds_per_step(True)) for _ in range(blocks)]
    without, with_adapters = (statistics.median(column) * 1e3 for column in zip(*figures, strict=True))
    cost = statistics.median(b / a for a, b in figures) - 1
    print(
        f"{name}, {rows} rows: {without:.2f} ms a step without adapters, {with_adapters:.2f} ms with {adapters} of rank {rank} "
        f"({bench.adapter_bytes / 1e6:.0f} MB): {cost:+.1%}"
    )


if __name__ == "__main__":
    typer.run(main)
