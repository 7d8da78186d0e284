"""The worker group with a step in flight: failures, and pools that do not grow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Never

import pytest
import torch

from backend.api import EngineConfig, OutputConfig, Request, SamplingConfig
from backend.api.config import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.core.step import NewRow, SampledToken, StepInput, StepOutput, WorkersLost
from backend.engine.core import EngineCore
from backend.worker.group import InProcessWorkerGroup
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.pipeline import Pending


def make_core(directory: Path, look_ahead: bool = True) -> EngineCore:
    config = EngineConfig(
        ModelConfigSection(path=str(directory), dtype="float32", device="cpu", kernels="torch", num_threads=1),
        KvCacheConfig(block_size=4, max_tokens=400),
        SchedulerConfig(max_batch_size=4, look_ahead=look_ahead),
    )
    return EngineCore(config, InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache))


def ask(core: EngineCore, request_id: int, prompt: list[int]) -> None:
    core.enqueue(request_id, Request(prompt, 6, output_config=OutputConfig(exclude_input_from_output=True)))


def finish(core: EngineCore) -> dict[int, object]:
    responses = {}
    while core.has_work:
        responses |= {response.request_id: response for response in core.step()}
    return responses


@pytest.mark.parametrize("place", ["launch", "wait"])
def test_after_a_failed_step_nobody_gets_the_answer_of_another(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    caplog.set_level(logging.CRITICAL, logger="everbatch.engine")
    expected = make_core(checkpoint("llama2"), look_ahead=False)
    ask(expected, 2, [5, 6, 7])
    core = make_core(checkpoint("llama2"))
    runner, calls = core.workers.runner, []

    def launch(step: StepInput) -> Pending:
        calls.append(step.step_id)
        pending = original(step)
        if len(calls) == 4 and place == "launch":
            raise RuntimeError("out of memory")
        if len(calls) == 4:
            monkeypatch.setattr(type(pending), "wait", fail_once(type(pending).wait))
        return pending

    def fail_once(wait: Callable[[Pending], StepOutput]) -> Callable[[Pending], Never]:
        def failing(self: Pending) -> Never:
            monkeypatch.setattr(type(self), "wait", wait)
            raise RuntimeError("out of memory")

        return failing

    original = runner.launch
    monkeypatch.setattr(runner, "launch", launch)
    ask(core, 1, [1, 2, 3])
    assert "the model step failed" in finish(core)[1].error_msg
    ask(core, 2, [5, 6, 7])
    assert finish(core)[2].result.output_token_ids == finish(expected)[2].result.output_token_ids


def test_workers_that_are_lost_end_the_engine(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(checkpoint("llama2"))

    def launch(step: StepInput) -> Never:
        raise WorkersLost("the device is lost")

    monkeypatch.setattr(core.workers.runner, "launch", launch)
    ask(core, 1, [1, 2, 3])
    with pytest.raises(WorkersLost):
        core.step()


def test_a_pool_whose_growth_failed_half_way_grows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = KVStorage(3, (2,), torch.float32, torch.device("cpu"))
    storage.grow(4)
    for pool in storage.pools:
        pool.fill_(7)
    allocate = storage._allocate
    monkeypatch.setattr(storage, "_allocate", lambda count: allocate(count) if len(storage.pools[0]) == 4 else fail())
    with pytest.raises(MemoryError):
        storage.grow(8)
    monkeypatch.setattr(storage, "_allocate", allocate)
    storage.grow(8)
    assert storage.num_blocks == 8 and all(len(pool) == 8 and (pool[:4] == 7).all() for pool in storage.pools)


def fail() -> Never:
    raise MemoryError


def test_tokens_of_a_device_are_written_as_those_of_a_host_are() -> None:
    """Without the array that is the CPU's own memory, everything is sent."""
    batches = [InputBatch(3, 8, 4, torch.device("cpu")) for _ in range(2)]
    batches[1]._host_ids = None
    for batch in batches:
        batch.take_in([NewRow(slot, [slot + 1] * (5 - slot), 2, 0, [0, 1], SamplingConfig()) for slot in (2, 0)])
        batch.append_tokens([SampledToken(0, 50), SampledToken(2, 52)])
    assert torch.equal(batches[0].token_ids, batches[1].token_ids) and batches[0].num_tokens == batches[1].num_tokens
    assert batches[0].token_ids[0].tolist() == [1, 1, 1, 1, 1, 50, 0, 0]
