"""What LoRA adapters cost a step that generates, beside the same rows without any, through the whole engine on the native tier.

    python -m benchmarks.lora                       shape L with random weights in bfloat16, 32 rows, 8 adapters of rank 16
    python -m benchmarks.lora --shape M --rank 64   another size, another rank
    python -m benchmarks.lora --model-dir DIR       your checkpoint

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
from backend.api.config import KvCacheConfig, LoraSection, ModelConfigSection, SchedulerConfig
from backend.api.lora import LoraConfig
from backend.api.request import RequestId
from backend.api.tensor import TensorData
from backend.engine.core import EngineCore
from backend.models.config import ModelConfig, read_model_config
from backend.models.lora import MODULES, places
from backend.worker.group import InProcessWorkerGroup
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


def main(
    shape: Annotated[str, typer.Option(help="Of the random model: S, M or L.")] = "L",
    model_dir: Annotated[Path | None, typer.Option(help="A checkpoint instead.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of the batch.")] = 32,
    adapters: Annotated[int, typer.Option(help="Adapters that take turns in the rows.")] = 8,
    rank: Annotated[int, typer.Option(help="Of each adapter.")] = 16,
    blocks: Annotated[int, typer.Option(help="Blocks of steps of each kind.")] = 7,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = model_dir or make_random_model(Path(scratch) / shape, shape=shape)
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
