"""LoRA adapters in whole engines on the triton tier, in the interpreter. The torch tier, which PEFT has judged, is the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.api import EngineConfig, Request
from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection, SchedulerConfig
from backend.api.lora import LoraConfig
from backend.core.step import Row
from backend.engine.core import EngineCore
from backend.worker.device_runner import DeviceRunner
from backend.worker.group import InProcessWorkerGroup
from tests.kernels.interpreted.test_device_runner import BLOCK_SIZE, directory, finish  # noqa: F401 (fixture)
from tests.model.adapters import make_adapter

LORA = LoraSection(enabled=True, max_rank=8)


def make_core(path: Path, kernels: str, adapters: list[Path]) -> EngineCore:
    config = EngineConfig(
        ModelConfigSection(path=str(path), dtype="float32", device="cpu", kernels=kernels),
        KvCacheConfig(block_size=BLOCK_SIZE, max_tokens=60 * BLOCK_SIZE, watermark=0.0),
        SchedulerConfig(max_batch_size=8, max_num_tokens=24),
        lora=LORA,
    )
    workers = InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache, lora=LORA)
    core = EngineCore(config, workers)
    for task_id, adapter in enumerate(adapters):
        core.scheduler.adapters.put(("", task_id), workers.prepare_adapter(LoraConfig(task_id, path=str(adapter))))
    return core


@pytest.mark.feature("000-19")
def test_adapters_on_the_triton_tier_are_those_of_the_torch_tier(
    directory: Path,  # noqa: F811 (fixture)
    tmp_path: Path,
) -> None:
    """Five adapters: more than there are places at first, so that the stacks grow while the first ones are in use."""
    fields = [dict(rank=4), dict(rank=8, target_modules=["q_proj", "down_proj"])]
    adapters = [make_adapter(directory, tmp_path / str(seed), seed, size=2.0, **fields[seed % 2]) for seed in range(5)]
    requests = [Request([5 + row, 6, 7, 8], 6, lora=LoraConfig(row)) for row in range(5)] + [Request([5, 6, 7, 8], 6)]
    of_torch = [result.output_token_ids for result in finish(make_core(directory, "torch", adapters), requests)]
    of_triton = [result.output_token_ids for result in finish(make_core(directory, "triton", adapters), requests)]
    assert of_triton == of_torch
    plain = [Request(each.input_token_ids, 6) for each in requests]
    without = [result.output_token_ids for result in finish(make_core(directory, "triton", []), plain)]
    assert sum(a != b for a, b in zip(of_triton, without, strict=True)) == 5


@pytest.mark.feature("000-19")
def test_steps_with_adapters_replay_no_graph_and_those_behind_them_do(
    directory: Path,  # noqa: F811 (fixture)
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph knows no adapters. Of the twelve steps the adapted request is in six, all of which are eager."""
    ran: list[tuple[str, bool]] = []

    def note(name: str) -> None:
        run = getattr(DeviceRunner, name)

        def noted(runner: DeviceRunner, rows: list[Row], *rest: object) -> object:
            ran.append((name, any(runner.batch.adapters[row.slot] for row in rows)))
            return run(runner, rows, *rest)

        monkeypatch.setattr(DeviceRunner, name, noted)

    note("_run_generation")
    note("_forward")
    adapter = make_adapter(directory, tmp_path / "adapter", 1, size=2.0)
    requests = [Request([5, 6, 7, 8], 6, lora=LoraConfig(0)), Request([5, 6, 7, 8], 12)]
    of_triton = [result.output_token_ids for result in finish(make_core(directory, "triton", [adapter]), requests)]
    assert ran == [("_forward", True)] * 6 + [("_run_generation", False)] * 6
    of_torch = [result.output_token_ids for result in finish(make_core(directory, "torch", [adapter]), requests)]
    assert of_triton == of_torch
